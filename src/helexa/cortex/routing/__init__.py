"""Choice of the node that serves a request, among the nodes that have the model loaded."""
