"""The API document and lists that routes answer with."""
