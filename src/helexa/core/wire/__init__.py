"""The public dialects as typed values."""
