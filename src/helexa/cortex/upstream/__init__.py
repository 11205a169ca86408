"""The HTTP/1.1 client of requests to nodes: pooled connections, responses as raw bytes.

A general-purpose client costs more processor time per request than the rest of the gateway, so this client implements
only the features that forwarding needs: one connection pool per origin, back-pressure, and timeouts on silence instead
of a total timeout. httptools (llhttp) parses the responses in strict mode.

Timeouts:

* Connecting to a node may take `CONNECT_TIMEOUT_SECS`.
* Before the first byte of a response's body, `idle_timeout_secs` without data fail the request only if the node is down
  according to the `is_alive` callback. A live node may take up to `answer_timeout_secs` for the first byte. The default
  is no limit, because a slow node may need any time for a non-streamed response.
* After the first byte, `idle_timeout_secs` without data fail the request.
* TCP keep-alive probes fail a connection whose host vanished or restarted.
"""
