"""Other ranks of a tensor-parallel engine, which compute the steps of rank 0."""
