"""The method as a loop, and the host's decisions in it; pure."""
