"""The execution of rounds on the devices of this process, or of all processes of a run."""
