"""The web pages: tables of all results, and charts."""
