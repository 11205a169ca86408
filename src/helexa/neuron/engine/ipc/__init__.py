"""The protocol between the server process and an engine process. Does not import torch."""
