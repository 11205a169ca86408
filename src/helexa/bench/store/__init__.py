"""The SQLite database of measurements.

Only one process at a time takes measurements. Any number of processes can read the database meanwhile.
"""
