"""The protocol between the server process and an engine process, without torch."""
