"""Run rounds of training on the devices of this process, or of all processes of a run.

The modules of this package compile the programs of a round, read the sequences of the workers and
send them to devices, divide arrays over devices, and measure held-out losses.
"""
