"""Request records and Prometheus metrics."""
