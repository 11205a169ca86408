"""Executes engine steps: builds the input of each step from its plan, and computes the step on a device."""
