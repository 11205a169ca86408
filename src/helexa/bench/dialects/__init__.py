"""API formats: requests and parsers of streams."""
