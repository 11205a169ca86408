"""Runs steps on a device."""
