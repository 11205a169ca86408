"""Statistics on the measurements of many builds."""
