"""HTTP/1.1 client for requests to nodes, with pooled connections and response bodies as raw bytes.

A general-purpose client needs more processor time per request than all other code of the gateway. This client therefore
implements only the features that forwarding needs: one connection pool per origin, back-pressure, and timeouts that
expire when no data arrives, instead of a timeout for the whole response. httptools (llhttp) parses the responses in
strict mode.

The timeouts are:

* Connecting to a node may take `CONNECT_TIMEOUT_SECS`.
* Before the first byte of a response's body, `idle_timeout_secs` without data fail the request only if the node is down
  according to the `is_alive` callback. A live node may take up to `answer_timeout_secs` for the first byte. The default
  is no limit, because a slow node may need any time for a non-streamed response.
* After the first byte, `idle_timeout_secs` without data fail the request.
* TCP keep-alive probes fail a connection whose host vanished or restarted.
"""
