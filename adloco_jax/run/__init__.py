"""What happens around the rounds of a run: observers, ledger, checkpoints, resume, plan, export."""
