"""The subcommands of `helexa`, one module each."""
