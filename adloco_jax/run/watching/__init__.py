"""What watches a run at the end of its rounds: observers, the terminal, loggers, samples."""
