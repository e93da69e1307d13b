"""Learners that come and go: workers run in processes of a Ray cluster, the loop in the driver."""
