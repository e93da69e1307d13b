"""The elastic engine: workers run in processes of a Ray cluster, which may be lost and replaced.

These processes are called learners. One process, the driver, runs the training loop and holds the
parameters of the trainers. It asks the learners to run the rounds of workers.
"""
