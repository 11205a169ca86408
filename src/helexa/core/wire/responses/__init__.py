"""Bodies of OpenAI's Responses API."""
