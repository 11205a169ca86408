"""Model management: loads on demand, evictions that free memory, and queues of requests that wait for loads."""
