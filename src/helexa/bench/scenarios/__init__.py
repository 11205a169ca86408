"""Scenarios: loads that a benchmark sends to a model.

Each module defines one kind of scenario.
"""
