"""Admission: who may use a model now, who waits, and who is turned away."""
