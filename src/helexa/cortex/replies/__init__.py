"""Responses to clients, streamed or whole."""
