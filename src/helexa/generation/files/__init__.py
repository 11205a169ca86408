"""Prompts and results in files of JSON lines."""
