"""Request and response bodies of OpenAI's Responses API."""
