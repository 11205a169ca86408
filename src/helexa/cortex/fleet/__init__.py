"""The nodes of a gateway: their state, the polling of nodes, and the client for nodes."""
