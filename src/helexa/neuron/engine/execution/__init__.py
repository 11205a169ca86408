"""Builds the input of each engine step from its plan, and computes the step."""
