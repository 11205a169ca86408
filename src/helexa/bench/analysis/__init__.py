"""Statistics over measured series."""
