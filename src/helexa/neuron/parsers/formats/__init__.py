"""One module per tool-call format."""
