"""What both servers need of HTTP: a listener that strangers may speak to, and what is read of any request's head."""
