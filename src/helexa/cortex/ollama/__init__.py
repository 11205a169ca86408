"""Support for clients of Ollama's API.

The gateway translates each request to a request of OpenAI's API, and the node's response to a response of Ollama's API.
Streams are lines of JSON instead of server-sent events.
"""
