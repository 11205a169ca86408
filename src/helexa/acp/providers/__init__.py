"""Clients of model endpoints, one module for each API format.

All clients implement the protocol `Provider`.
"""
