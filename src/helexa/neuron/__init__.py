"""The node: an HTTP server process and one engine process per loaded model."""
