"""This process and its neighbours: connecting, signals, threads, and lines on the terminal.

What any room above the line may need, and knows nothing of a run, belongs here.
"""
