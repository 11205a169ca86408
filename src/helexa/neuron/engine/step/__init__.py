"""The input and output of one engine step as plain values. Also computes embeddings and prompt log-probabilities."""
