"""What processes import before a model can answer."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

MODULES_OF_SERVERS = (
    "helexa.http",
    "helexa.cortex",
    "helexa.neuron.routes",
    "helexa.neuron.app",
    "helexa.neuron.middleware",
)
SERVER = {"starlette", "anyio", *MODULES_OF_SERVERS}
OTHER_PROCESSES = {"tokenizers", "jinja2", "llguidance", "numpy", "PIL"}
"""Packages that only processes of engines and texts need."""


def imported(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


def test_modules_of_servers_exist() -> None:
    assert [name for name in MODULES_OF_SERVERS if find_spec(name) is None] == []


def test_caller_of_a_private_engine_imports_no_server_and_no_package_of_other_processes() -> None:
    modules = imported("import helexa.generation.private")
    assert modules & (SERVER | OTHER_PROCESSES) == set()


def test_command_starts_its_engine_process_before_it_imports_errors_and_tracebacks() -> None:
    modules = imported("import helexa.generation.early_start, helexa.neuron.engine_client.early_start")
    assert modules & {"helexa.core.errors", "traceback", "logging", "asyncio", "dataclasses"} == set()


def test_caller_of_a_private_engine_imports_no_http_client_and_reads_memory_without_psutil() -> None:
    modules = imported(
        "import helexa.cli.commands.generate, helexa.generation.private\n"
        "from helexa.neuron.hardware.device_choice import device_for; device_for(1)"
    )
    assert modules & {"urllib.request", "http.client", "psutil", "helexa.neuron.hardware.discovery"} == set()


def test_load_with_default_options_begins_without_pydantic_and_without_modules_of_requests() -> None:
    program = (
        "from helexa.generation.private import EngineSettings\n"
        "EngineSettings().config().harness.torch.engine_options('cpu')"
    )
    modules = imported(program)
    assert (
        modules & {"pydantic", "helexa.core.wire.openai_chat", "helexa.neuron.requests", "helexa.neuron.grammar"}
        == set()
    )


def test_engine_imports_no_package_of_grammars_and_reads_memory_without_psutil() -> None:
    program = (
        "import helexa.neuron.engine.loop, helexa.neuron.engine.loading.load\n"
        "from helexa.neuron.hardware.cpus import physical_cores\n"
        "from helexa.neuron.hardware.host_memory import host_memory\n"
        "host_memory(), physical_cores()"
    )
    assert imported(program) & {"llguidance", "importlib.metadata", "email", "psutil", "pydantic"} == set()


def test_choice_of_a_device_imports_nvml_only_with_its_library() -> None:
    statement = (
        "from helexa.neuron.hardware import accelerators; accelerators._LIBRARY = 'libmissing.so.1'; "
        "from helexa.neuron.hardware.device_choice import device_for; device_for(1)"
    )
    assert "pynvml" not in imported(statement)


def test_package_helexa_imports_no_slow_modules() -> None:
    """Every process of helexa imports the package."""
    assert imported("import helexa") & {"subprocess", "json", "datetime", "logging", "asyncio"} == set()


def test_help_imports_no_parser_of_markdown_and_no_configuration() -> None:
    program = "from helexa.cli import _run; _run(['--help'])"
    modules = imported(f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): {program}\n")
    assert modules & {"markdown_it", "pygments", "pydantic", "asyncio", "numpy"} == set()


def test_server_of_a_node_imports_no_package_of_other_processes() -> None:
    modules = imported("import helexa.neuron.app")
    assert modules & (OTHER_PROCESSES - {"jinja2"}) == set()  # the module that inspects models imports jinja2


def test_list_of_models_imports_no_gateway_and_no_commands_of_servers() -> None:
    modules = imported("import helexa.cli.commands.list_show_and_pull")
    unused = {"helexa.cortex", "helexa.cli.commands.ps_and_status", "helexa.cli.commands.load_and_unload", "starlette"}
    assert modules & unused == set()


def test_command_that_generates_imports_no_messages_of_engines_before_it_starts_processes() -> None:
    modules = imported("import helexa.cli.commands.generate")
    assert modules & {"pydantic", "orjson", "msgspec", "helexa.neuron.engine.ipc.messages"} == set()


def test_private_engine_answers_a_text_without_pydantic(smollm2_gguf: Path) -> None:
    program = (
        f"import helexa; completion = helexa.generate('Hello', model={str(smollm2_gguf)!r}, target='private', "
        "max_tokens=1, temperature=0.5)\n"
        "assert completion.usage.completion == 1"
    )
    assert (
        imported(program) & {"pydantic", "pydantic_core", "helexa.core.wire.request", "helexa.core.node_reports"}
        == set()
    )


def test_garbage_collector_does_not_run_during_the_imports_of_a_command() -> None:
    program = (
        "import gc; from helexa.__main__ import _OBJECTS; gc.set_threshold(_OBJECTS, 10, 10)\n"
        "runs = sum(generation['collections'] for generation in gc.get_stats())\n"
        "import helexa.cli.commands.generate, helexa.generation.private as private; private._import_request_modules()\n"
        "assert sum(generation['collections'] for generation in gc.get_stats()) == runs"
    )
    assert "helexa.neuron.requests.inference" in imported(program)


def test_text_process_reads_a_vocabulary_without_numpy(smollm2_gguf: Path) -> None:
    """On 64 processors, numpy's threads reserve more address space than the process may have."""
    program = f"from helexa.neuron.text.text_process import _opened\n_opened({bytes(smollm2_gguf)!r})"
    assert imported(program) & {"numpy", "torch"} == set()
