"""Analyse runs, finished or running, from their ledgers: reports, comparisons and figures."""
