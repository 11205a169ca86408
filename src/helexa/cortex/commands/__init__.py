"""Subcommands of `cortex` other than `serve` and `status`."""
