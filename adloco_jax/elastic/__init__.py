"""The elastic engine: workers run in learners, processes that may be lost and replaced.

The driver runs the training loop, holds the trainers' parameters, and asks for rounds.
"""
