"""Images in prompts, without torch: preprocessing of images, and the tokens and positions of images in a prompt."""
