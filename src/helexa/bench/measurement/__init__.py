"""Measurement: requests, load shapes, records, metrics. No I/O."""
