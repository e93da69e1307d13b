"""The elastic engine: workers run in processes that may be lost and replaced.

These processes are called learners. One process, the driver, runs the training loop and holds the
parameters of the trainers. It asks the learners to run the rounds of workers.
"""
