"""Runs prompts from a file of JSON lines and writes the results to another file."""
