"""Discover the CPU, the accelerators and the memory of this machine."""
