"""What one learns from finished and running runs; reads their ledgers, never their programs."""
