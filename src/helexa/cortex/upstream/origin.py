"""Origins: scheme, host and port of a node's base URL."""

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Origin:
    """The origin of a URL: scheme, host and port of a server. `tls` is True for https."""

    host: str
    port: int
    tls: bool

    @property
    def authority(self) -> str:
        """The value of the `Host` header for requests to this origin."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


@lru_cache(maxsize=1024)
def parse_base(url: str) -> tuple[Origin, str]:
    """Split a node's base URL into its origin and its path. The URL must be valid."""
    url_parts = urlsplit(url)
    tls = url_parts.scheme == "https"
    host = (url_parts.hostname or "").encode("idna").decode()
    return Origin(host, url_parts.port or (443 if tls else 80), tls), url_parts.path
