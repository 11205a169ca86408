"""Pipeline parallelism: the stages of a model, on several hosts, that compute its layers one after another."""
