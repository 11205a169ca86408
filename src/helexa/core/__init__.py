"""Shared types and helpers: errors, configuration, wire formats.

This package imports neither torch nor a web framework, and runs no event loop.
"""
