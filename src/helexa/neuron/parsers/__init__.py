"""Separate a model's output into reasoning, tool calls and text."""
