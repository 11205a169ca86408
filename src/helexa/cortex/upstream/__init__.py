"""HTTP/1.1 client for nodes: pooled connections, and response bodies as raw bytes.

A general-purpose client needs more processor time per request than all other code of the gateway. This client therefore
implements only the features that forwarding needs. It has one connection pool per origin, back-pressure, and timeouts
that expire when no data arrives, but no timeout for the whole response. httptools (llhttp) parses the responses in
strict mode.

The timeouts are:

* `CONNECT_TIMEOUT_SECS` limits the time to connect to a node.
* Before the first byte of a response body, a request to a node that is down fails after `idle_timeout_secs` without
  data. The `is_alive` callback reports whether the node is down. A live node may take up to `answer_timeout_secs` for
  the first byte. By default there is no such limit, because a non-streamed response may take arbitrarily long.
* After the first byte of the body, a request fails after `idle_timeout_secs` without data.
* TCP keep-alive probes detect that a node's host vanished or restarted. Its connections then fail.
"""
