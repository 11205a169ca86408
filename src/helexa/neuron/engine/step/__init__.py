"""The input and output of one step as plain values."""
