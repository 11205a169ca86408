"""One file per `model_type`; each says only what differs."""
