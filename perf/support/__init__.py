"""Modules that the benchmark scripts share; none of them is run as a command."""
