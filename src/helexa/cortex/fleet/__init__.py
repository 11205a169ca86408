"""The nodes of a gateway: their state, how it is polled, and how nodes are called."""
