"""Writes the scheduler's inputs and plans to a log. A replay of the log finds the first plan that differs."""
