"""The verbs of `helexa-bench`."""
