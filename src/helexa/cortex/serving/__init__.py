"""Serves a parsed request: authorization, rate limits, budget reservation, forwarding and charging."""
