"""The way of a request to a node and of its response back to the client."""
