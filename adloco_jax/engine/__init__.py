"""What runs a round on the devices of this program."""
