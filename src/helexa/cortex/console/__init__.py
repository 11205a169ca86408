"""The console: the web page that the gateway serves to browsers, its sign-in, and live events."""
