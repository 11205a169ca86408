"""Benchmarks: measure each build on each target, compare, and serve results."""
