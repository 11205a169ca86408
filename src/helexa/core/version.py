"""The version of helexa, as stated in pyproject.toml."""

__version__ = "0.1.0"
