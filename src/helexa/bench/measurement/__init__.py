"""What is measured: requests, load shapes, records, metrics. No I/O."""
