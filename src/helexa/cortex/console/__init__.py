"""The console: its web page, sign-in, and live events."""
