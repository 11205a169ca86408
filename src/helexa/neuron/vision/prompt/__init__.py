"""The tokens, positions and attention ranges of images in a prompt, as pure functions without torch."""
