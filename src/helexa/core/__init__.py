"""Types and helpers that the gateway, the node and other programs share: errors, configuration, API formats.

This package imports neither torch nor a web framework, and runs no event loop.
"""
