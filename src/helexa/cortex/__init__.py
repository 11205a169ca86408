"""The gateway: one address for any number of nodes."""
