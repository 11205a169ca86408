"""Parsers of values inside tool calls."""
