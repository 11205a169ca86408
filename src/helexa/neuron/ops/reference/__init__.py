"""All operations in plain torch."""
