"""What is served: the pages, the API and the files they need, from a database that is only read."""
