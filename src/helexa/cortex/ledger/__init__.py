"""Data that gateways store in SQLite or PostgreSQL: API keys, token budgets, spent tokens and the activity log."""
