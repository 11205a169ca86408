"""What was measured, in SQLite: one process writes, any number read."""
