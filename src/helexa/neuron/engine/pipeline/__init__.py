"""Pipeline parallelism: stages on several hosts compute a model's layers in turn."""
