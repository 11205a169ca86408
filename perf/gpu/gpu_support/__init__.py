"""Modules that several GPU scripts import. They are not commands."""
