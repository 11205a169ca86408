"""The pieces that model files are assembled from."""
