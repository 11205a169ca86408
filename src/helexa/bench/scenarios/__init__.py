"""Scenarios: named loads, one module per family."""
