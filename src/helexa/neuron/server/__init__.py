"""The HTTP application of a node: middleware, lifecycle and health."""
