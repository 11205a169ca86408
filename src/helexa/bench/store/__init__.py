"""Storage of measurements in SQLite: one writing process, any number of readers."""
