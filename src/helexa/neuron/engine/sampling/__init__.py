"""Samples tokens from logits. If a request has a grammar, only tokens that the grammar allows are sampled."""
