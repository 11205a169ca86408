"""Subcommands of `cortex` other than `serve`."""
