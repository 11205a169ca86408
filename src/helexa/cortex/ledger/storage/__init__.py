"""The ledger on SQLite and PostgreSQL."""
