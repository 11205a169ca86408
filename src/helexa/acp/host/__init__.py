"""Access to files and commands, on this machine or through the client's editor."""
