"""What happens before the first round: checks, putting a run together, saying what it will need."""
