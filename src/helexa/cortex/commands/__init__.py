"""Subcommands of the `cortex` command line, except `serve` and `status`."""
