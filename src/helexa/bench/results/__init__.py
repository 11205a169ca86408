"""Queries over the measurements: the same numbers for pages, API, reports and exports."""
