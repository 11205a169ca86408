"""Clients of model endpoints: one module per wire API behind the `Provider` protocol."""
