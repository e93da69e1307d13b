"""The execution of rounds on the devices of this program."""
