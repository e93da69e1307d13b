"""The training loop of AdLoCo, and the decisions of the host in it; reads no files and clocks."""
