"""Tensor parallelism: the processes (ranks) that compute one model together, and how they exchange results."""
