"""Classes for the request and response bodies of the public APIs."""
