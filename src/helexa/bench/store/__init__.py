"""The SQLite database of measurements. One process writes.

Any number of processes read.
"""
