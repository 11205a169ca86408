"""Statistics of measured series."""
