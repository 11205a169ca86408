"""Models that come and go: loads, evictions, and those who wait."""
