"""Anthropic's requests as chat requests."""
