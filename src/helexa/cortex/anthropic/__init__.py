"""Anthropic's Messages API: requests are translated to chat requests, chat completions to messages."""
