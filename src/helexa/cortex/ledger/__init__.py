"""Persistent state of gateways in SQLite or PostgreSQL: keys, budgets, spent tokens and the activity log."""
