"""Parsers that separate a model's output into reasoning, tool calls and text while it is generated."""
