"""The nodes that a gateway uses: state of the nodes, polling, circuit breakers, and the client for their API."""
