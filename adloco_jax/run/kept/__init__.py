"""What a run keeps in its folder: config, ledger, checkpoints, the exported model."""
