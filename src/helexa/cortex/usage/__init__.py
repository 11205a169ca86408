"""Token counts: reads the token limits of requests and the token usage of responses."""
