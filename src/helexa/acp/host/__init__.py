"""Where files are and commands run: this machine, or the client's editor."""
