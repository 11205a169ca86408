"""What all programs share: errors, configuration, API formats.

This package imports neither torch nor a web framework, and runs no event loop.
"""
