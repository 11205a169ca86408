"""Modules that several benchmark scripts import. They are not commands."""
