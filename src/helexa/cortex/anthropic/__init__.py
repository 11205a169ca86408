"""Support for clients of Anthropic's Messages API.

The gateway translates each request to an OpenAI chat request, and the node's chat completion to a Messages API
response.
"""
