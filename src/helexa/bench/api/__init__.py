"""The read-only HTTP API that returns benchmark results from the database."""
