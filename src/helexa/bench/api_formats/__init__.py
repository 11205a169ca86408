"""API formats of servers: building of request bodies, and parsing of streamed responses."""
