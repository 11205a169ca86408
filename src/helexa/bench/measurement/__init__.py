"""Load generation and metrics, without I/O."""
