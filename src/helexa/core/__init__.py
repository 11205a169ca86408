"""The words the rooms share: no I/O loops, no torch, no web framework."""
