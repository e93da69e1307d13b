"""The elastic engine: workers run in processes of a Ray cluster (learners), which may be lost.

The training loop runs in one process, the driver.
"""
