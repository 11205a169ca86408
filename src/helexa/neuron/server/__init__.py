"""The HTTP application of a node: middleware, access checks, start and shutdown, and health reports."""
