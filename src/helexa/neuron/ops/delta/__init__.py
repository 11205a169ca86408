"""Gated delta rule and its state cache."""
