"""Writes the scheduler's inputs and plans to a log, and replays the log to find the first plan that differs."""
