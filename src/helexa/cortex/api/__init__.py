"""Builds the OpenAPI document and the list of models."""
