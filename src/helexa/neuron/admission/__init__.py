"""Admission control: decide which requests run, wait or are rejected."""
