"""HTTP/1.1 server for ASGI applications, which the node and the gateway share."""
