"""Authentication and authorization of requests, and rate limits per API key."""
