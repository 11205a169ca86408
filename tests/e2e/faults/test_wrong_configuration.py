"""Wrong configurations: each command prints one line that names the file and the fix, and exits with code 78."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

EX_CONFIG = 78
NODES = (("helexa.neuron",), ("helexa", "node"))
GATEWAYS = (("helexa.cortex", "serve"), ("helexa", "gateway", "serve"))
GATEWAY = (
    'models_config = "models.toml"\n[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\n'
    '[ledger]\nurl = "sqlite:{folder}/cortex.db"\n[[neurons]]\nname = "n1"\nendpoint = "http://127.0.0.1:9"\n'
)


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def gateway(tmp_path: Path) -> Path:
    (tmp_path / "models.toml").touch()
    path = tmp_path / "cortex.toml"
    path.write_text(GATEWAY.format(folder=tmp_path))
    return path


def failure(code: int, *command: str | Path, **variables: str) -> str:
    """Run a command that must fail with the exit code `code` and one line on stderr. Return the line."""
    run = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | variables,
    )
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (code, "", 1), run.stderr
    return run.stderr


@pytest.mark.parametrize("command", NODES)
def test_node_exits_with_one_line_if_its_port_is_in_use(
    used_port: int, command: tuple[str, ...], tmp_path: Path
) -> None:
    config = tmp_path / "neuron.toml"
    config.write_text(f"port = {used_port}\n")
    line = failure(EX_CONFIG, *command, "-c", config)
    assert f"port {used_port} is in use by another process; end that process, or choose another port" in line
    assert f"port in {config}" in line


@pytest.mark.parametrize(("command", "setting"), list(zip(GATEWAYS, ("listen", "metrics_listen"), strict=True)))
def test_gateway_exits_with_one_line_if_its_port_is_in_use(
    used_port: int, command: tuple[str, ...], setting: str, gateway: Path
) -> None:
    address = f"127.0.0.1:{used_port}"
    line = failure(EX_CONFIG, *command, "-c", gateway, **{f"CORTEX_GATEWAY__{setting.upper()}": address})
    assert f"{gateway}: cannot listen on {address}: Address already in use; " in line
    assert line.endswith(f"change gateway.{setting}\n")


@pytest.mark.parametrize("command", NODES)
def test_node_exits_with_an_error_that_names_its_missing_key_file(command: tuple[str, ...], tmp_path: Path) -> None:
    config = tmp_path / "neuron.toml"
    config.write_text('api_key_file = "node.key"\n')
    line = failure(EX_CONFIG, *command, "-c", config)
    problem = "api_key_file cannot be read (No such file or directory); create the file, or change api_key_file"
    assert line.endswith(f": {tmp_path}/node.key: {problem}\n")


@pytest.mark.parametrize("command", GATEWAYS)
def test_gateway_exits_with_an_error_that_names_an_unreadable_key_file(
    command: tuple[str, ...], gateway: Path, tmp_path: Path
) -> None:
    (tmp_path / "node.key").mkdir()  # tests may run as root, who can read every file
    gateway.write_text(f'{gateway.read_text()}bearer_file = "node.key"\n')
    line = failure(EX_CONFIG, *command, "-c", gateway)
    fault = "bearer_file of neuron 'n1' cannot be read (Is a directory); name a file, or change bearer_file of"
    assert f": {tmp_path}/node.key: {fault}" in line


@pytest.mark.parametrize("command", [NODES[0], GATEWAYS[0]])
def test_error_for_an_unknown_configuration_key_suggests_an_upgrade(command: tuple[str, ...], tmp_path: Path) -> None:
    config = tmp_path / "new.toml"
    config.write_text("warp_drive = true\n")
    line = failure(EX_CONFIG, *command, "-c", config)
    assert f": {config}: unknown key 'warp_drive'" in line
    assert "if a newer helexa than " in line and "upgrade helexa" in line
    config.unlink()
    line = failure(EX_CONFIG, *command, "-c", config)
    assert line.endswith(f": {config}: no such file; create the file, or name another file with --config\n")


def test_gateway_exits_with_one_line_if_a_certificate_does_not_match_its_key(gateway: Path, tmp_path: Path) -> None:
    certificate, _ = write_certificate(tmp_path / "first")
    _, key = write_certificate(tmp_path / "second")
    url = f"postgresql://me:pa55@127.0.0.1:9/x?sslmode=require&sslcert={certificate}&sslkey={key}"
    line = failure(EX_CONFIG, *GATEWAYS[0], "-c", gateway, CORTEX_LEDGER__URL=url)
    problem = f"the certificate does not match its key {key}; check sslcert, sslkey and sslrootcert in ledger.url"
    assert line.endswith(f": {certificate}: {problem}\n")
    key.unlink()
    line = failure(EX_CONFIG, *GATEWAYS[0], "-c", gateway, CORTEX_LEDGER__URL=url)
    assert f"{key}: sslkey in ledger.url cannot be read (No such file or directory)" in line
    assert "pa55" not in line


def write_certificate(stem: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate and its key. Return the paths of both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, stem.name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    paths = stem.with_suffix(".pem"), stem.with_suffix(".key")
    paths[0].write_bytes(certificate.public_bytes(pem))
    paths[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password))
    return paths


def test_gateway_on_a_network_address_without_keys_exits_and_names_its_config_file(gateway: Path) -> None:
    line = failure(EX_CONFIG, *GATEWAYS[0], "-c", gateway, CORTEX_GATEWAY__LISTEN="0.0.0.0:0")
    assert line.startswith(f"cortex: {gateway}: 0.0.0.0:0 is reachable from other machines")


def test_invalid_values_of_command_line_options_are_usage_errors(gateway: Path) -> None:
    assert "--listen: 'here' is not an address" in failure(2, *GATEWAYS[0], "-c", gateway, "--listen", "here")
    assert "--max-num-seqs: harness.torch.max_sequences" in failure(2, *NODES[0], "--max-num-seqs", "0")
