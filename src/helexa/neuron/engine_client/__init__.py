"""The server's side of engine processes: starts and ends them, sends them requests, and grants them memory."""
