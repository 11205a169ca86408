"""Access to files and shell commands, on this machine or through the editor."""
