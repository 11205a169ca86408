"""The node program: an HTTP server process, which starts one engine process per loaded model."""
