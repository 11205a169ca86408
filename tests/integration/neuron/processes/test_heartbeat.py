"""The engine's progress count is shared between two processes."""

import subprocess
import sys

from helexa.neuron.processes.heartbeat import Heartbeat


def count_in_another_process(heartbeat: Heartbeat, beats: int) -> None:
    code = f"from helexa.neuron.processes import heartbeat; heartbeat.attach({heartbeat.fd})"
    code += f"\nfor _ in range({beats}): heartbeat.beat()"
    subprocess.run([sys.executable, "-c", code], pass_fds=[heartbeat.fd], check=True, timeout=60)


def test_server_process_reads_the_heartbeat_count_written_by_the_engine() -> None:
    heartbeat = Heartbeat()
    try:
        assert heartbeat.count == 0
        count_in_another_process(heartbeat, 5)
        assert heartbeat.count == 5
        count_in_another_process(heartbeat, 2)
        assert heartbeat.count == 7
    finally:
        heartbeat.release_fd()
        heartbeat.close()
