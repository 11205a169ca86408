"""Images in prompts: checks of data URLs, and downloads of images from http(s) URLs."""
