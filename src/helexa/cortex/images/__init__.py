"""Images in prompts: checks of data URLs, and downloads from http(s) URLs."""
