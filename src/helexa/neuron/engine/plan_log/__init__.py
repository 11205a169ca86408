"""Writes the scheduler's plans to a log, and replays the log."""
