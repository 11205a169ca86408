"""The server's side of engine processes: start, requests, memory grants."""
