"""The other ranks of a tensor-parallel engine: processes that compute the steps which rank 0 sends to them."""
