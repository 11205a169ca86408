"""Shared types and helpers: errors, configuration, wire formats. Imports no torch and no web framework, runs no I/O
loop.
"""
