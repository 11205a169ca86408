"""Client connections: accepting, limits, HTTP/1.1 parsing, and execution of requests."""
