"""Builds the content of `/openapi.json` and `/v1/models`."""
