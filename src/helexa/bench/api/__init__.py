"""The HTTP API over a database that is only read."""
