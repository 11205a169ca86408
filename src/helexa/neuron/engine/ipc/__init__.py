"""Messages between the server process and an engine process. No torch."""
