"""Parsers of the values in tool calls: JSON values, Python strings and arguments."""
