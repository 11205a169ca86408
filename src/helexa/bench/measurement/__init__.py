"""Load generation and metrics: prompts, arrival times, request records, and their evaluation. Does no I/O."""
