"""Translates chat completions to messages and events of the Messages API."""
