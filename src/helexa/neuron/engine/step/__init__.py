"""Input and output of one step as plain values."""
