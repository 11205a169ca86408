"""The pages: every answer as a table, and drawn where a drawing says more."""
