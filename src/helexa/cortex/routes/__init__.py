"""The gateway's HTTP routes, one file per surface."""
