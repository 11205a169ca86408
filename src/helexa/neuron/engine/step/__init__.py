"""The input and output of one engine step as plain values, and the computation of embeddings and prompt scores."""
