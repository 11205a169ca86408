"""Support for server and engine processes."""
