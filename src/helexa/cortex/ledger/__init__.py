"""Keys, budgets, charges and the activity log, in SQLite or PostgreSQL."""
