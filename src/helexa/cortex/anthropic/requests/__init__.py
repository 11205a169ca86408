"""Translates requests of the Messages API to chat requests."""
