"""Check whether the node can listen on its configured address."""

import psutil

from helexa.core.errors import HelexaError
from helexa.http.listener import AddressInUseError, bind
from helexa.neuron.doctor.check_result import CheckResult


def look_at_port(host: str, port: int) -> CheckResult:
    """Check whether a process can listen on `host` and `port`.

    A port that is in use is only a `note`, because the process that uses the port may be this node itself.
    """
    try:
        bind((host, port)).close()
    except AddressInUseError:
        owner = _owner(port)
        by = f" by {owner}" if owner else ""
        text = f"port {port} is in use{by}; unless that is this node, choose another with --port"
        return CheckResult("port", "note", text)
    except HelexaError as error:
        return CheckResult("port", "fault", str(error))
    return CheckResult("port", "fine", f"{host}:{port} is free to listen on")


def _owner(port: int) -> str | None:
    """Return the id and command line of the process that listens on `port`, as text. None if unknown."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                process = psutil.Process(connection.pid)
                return f"process {connection.pid} ({' '.join(process.cmdline())[:100] or process.name()})"
    except (psutil.Error, OSError):
        pass  # other users' processes are not visible
    return None
