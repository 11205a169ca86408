"""Parsers of tool-call formats; similar formats share a module."""
