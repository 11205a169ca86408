"""Model sources: find or download a model on this machine.

A source id such as `huggingface:org/name` has a scheme, which selects the type of source, and a name.
"""
