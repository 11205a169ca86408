"""What the `cortex` command does beside serving."""
