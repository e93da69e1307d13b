"""Analysis of finished and running runs, from their ledgers."""
