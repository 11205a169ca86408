"""Token counts: the package reads token limits from requests and token usage from responses."""
