"""Analyse runs, finished or running, from their ledgers: reports, comparisons and figures.

A ledger is the log of a run: a file with one JSON line for each event, such as a round.
"""
