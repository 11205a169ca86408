"""Images in prompts, without torch: preprocessing, tokens and positions."""
