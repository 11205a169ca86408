"""Loads models onto nodes on demand, evicts models to free memory, and queues the requests that wait for loads."""
