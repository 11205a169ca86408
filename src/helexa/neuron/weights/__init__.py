"""Model files: reading, validating and repacking weights."""
