"""The gated delta rule and its cache."""
