"""Picks tokens from logits, under grammars."""
