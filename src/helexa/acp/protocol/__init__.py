"""The Agent Client Protocol: one module per part of the protocol."""
