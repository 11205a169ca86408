"""Parsers of tool-call formats, one module per format."""
