"""Loads models on demand, evicts models, and queues requests meanwhile."""
