"""The agent loop: request an answer from the model, run its tool calls, repeat."""
