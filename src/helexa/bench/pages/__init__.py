"""The HTML pages: tables and charts of all results."""
