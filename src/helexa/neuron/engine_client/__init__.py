"""The server's side of an engine process: its start and end, the requests sent to it, the memory promised to it."""
