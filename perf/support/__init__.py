"""Modules that the benchmark scripts share. None of them is a command."""
