"""Static files of web pages, and the style sheet and theme that the pages of all servers share."""
