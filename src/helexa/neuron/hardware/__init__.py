"""Discover CPU, accelerators and memory of this machine."""
