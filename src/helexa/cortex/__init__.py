"""The gateway: one address in front of any number of nodes."""
