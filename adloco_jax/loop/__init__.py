"""The training loop of AdLoCo, and the host's decisions in it; it reads no file and no clock."""
