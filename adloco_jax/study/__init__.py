"""Analyse finished and running runs from their ledgers: reports, comparisons, figures."""
