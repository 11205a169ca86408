"""Model management: loads models on demand, evicts models to free memory, and queues requests until a load ends."""
