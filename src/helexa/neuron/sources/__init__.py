"""Model sources: resolve an id such as `huggingface:org/name` to a file or folder on this machine."""
