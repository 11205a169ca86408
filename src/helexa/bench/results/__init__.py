"""Queries on the result database, used by pages, API, reports and exports."""
