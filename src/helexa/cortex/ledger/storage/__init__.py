"""The ledger's storage backends, SQLite and PostgreSQL."""
