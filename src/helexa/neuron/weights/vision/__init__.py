"""The vision part of a model's files: its configuration (read without torch) and its tensors."""
