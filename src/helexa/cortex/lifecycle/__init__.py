"""Loads models on demand, evicts models, and queues requests that wait for loads."""
