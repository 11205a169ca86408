"""Model sources: from an id such as `huggingface:org/name` to a file on this machine."""
