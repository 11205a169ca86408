"""The version of helexa from pyproject.toml."""

__version__ = "0.1.0"
