"""Samples tokens from logits, restricted by the request's grammar if it has one."""
