"""The gated delta rule in plain torch, and its cache of recurrent states."""
