"""Token counts: limits read from requests, usage read from responses."""
