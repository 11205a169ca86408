"""Routes of `/v1/responses`: create, read, delete and compact responses."""
