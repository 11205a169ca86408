"""Anthropic's Messages API, spoken by translation: a request becomes a chat request, an answer a message."""
