"""Types and helpers that gateway, node and other programs share: errors, configuration, API formats.

This package imports neither torch nor a web framework, and runs no event loop.
"""
