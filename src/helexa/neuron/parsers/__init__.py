"""A model's raw text read as reasoning, tool calls and text, while it is generated."""
