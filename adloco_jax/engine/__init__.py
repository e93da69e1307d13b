"""Run rounds of training on the devices of this process, or of all processes of a run."""
