"""Plain-torch implementation of all operations."""
