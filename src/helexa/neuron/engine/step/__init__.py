"""Inputs and results of one engine step, for the scheduler and the runner."""
