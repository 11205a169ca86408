"""The `helexa` command."""
