"""The node program: an HTTP server, and one engine process per model."""
