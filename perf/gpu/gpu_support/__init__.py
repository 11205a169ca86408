"""Modules that the GPU scripts share; none of them is run as a command."""
