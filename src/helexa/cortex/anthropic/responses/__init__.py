"""Translates chat completions to complete messages, or to stream events, of the Messages API."""
