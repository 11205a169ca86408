"""Modules that the GPU scripts share. None of them is a command."""
