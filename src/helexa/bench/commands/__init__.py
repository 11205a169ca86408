"""The subcommands of `helexa-bench`."""
