"""What is said to the client: one module per concern of the protocol."""
