"""Chooses tokens from logits, with grammars."""
