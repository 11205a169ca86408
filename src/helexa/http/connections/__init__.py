"""Client connections: accepting, limits, HTTP/1.1 parsing, one call at a time."""
