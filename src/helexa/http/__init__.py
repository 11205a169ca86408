"""HTTP server for both node and gateway: a hardened listener and helpers for request heads."""
