"""Exit with code 0 if the server in this container answers GET /health. HELEXA_PORT is its port (default 31313)."""

import os
import sys
import urllib.request

try:
    port = os.environ.get("HELEXA_PORT", "31313")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}/health", timeout=5)
except OSError as error:
    sys.exit(f"the server does not answer: {error}")
