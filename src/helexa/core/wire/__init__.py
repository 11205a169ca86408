"""Typed request and response bodies of the public API formats."""
