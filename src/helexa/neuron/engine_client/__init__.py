"""The server's side of an engine process: starts and ends it, sends requests, and grants memory."""
