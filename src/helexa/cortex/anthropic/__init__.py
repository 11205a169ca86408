"""Anthropic's Messages API: translates requests to chat requests, and chat completions to messages."""
