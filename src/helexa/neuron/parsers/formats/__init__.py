"""Tool-call formats, one module per format."""
