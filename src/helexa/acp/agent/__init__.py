"""The agent loop: request a response from the model, run the tool calls in the response, repeat."""
