"""Chat completions as Anthropic's messages and events."""
