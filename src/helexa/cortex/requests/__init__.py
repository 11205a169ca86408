"""Request bodies and headers: parsing, limits, rewriting, error responses."""
