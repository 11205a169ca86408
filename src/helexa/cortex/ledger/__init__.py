"""What must outlive a gateway: keys, budgets, what was spent and what went on, in SQLite or PostgreSQL."""
