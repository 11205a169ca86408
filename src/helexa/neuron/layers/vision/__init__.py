"""Layers of vision towers, which encode the patches of images."""
