"""The servers that `helexa up` runs on this machine, and the models that are downloaded to this machine."""
