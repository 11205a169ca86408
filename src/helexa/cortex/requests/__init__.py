"""Parses, limits and rewrites request bodies and headers, and builds error responses."""
