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
    "helexa.neuron.access_guard_and_request_logs",
)
SERVER = {"starlette", "anyio", *MODULES_OF_SERVERS}
OTHER_PROCESSES = {"tokenizers", "jinja2", "llguidance", "numpy", "PIL"}
"""Packages that only processes of engines and texts need."""


def imported(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


def test_each_module_that_commands_must_not_import_exists() -> None:
    assert [name for name in MODULES_OF_SERVERS if find_spec(name) is None] == []


def test_process_that_starts_a_private_engine_imports_only_the_packages_it_needs() -> None:
    modules = imported("import helexa.generation.private")
    assert modules & (SERVER | OTHER_PROCESSES) == set()


def test_modules_that_start_the_engine_process_early_import_neither_logging_nor_asyncio() -> None:
    modules = imported("import helexa.generation.early_start, helexa.neuron.engine_client.early_start")
    assert modules & {"helexa.core.errors", "traceback", "logging", "asyncio", "dataclasses"} == set()


def test_process_that_starts_a_private_engine_imports_no_http_client_and_no_psutil() -> None:
    modules = imported(
        "import helexa.cli.commands.generate, helexa.generation.private\n"
        "from helexa.neuron.hardware.device_choice import device_for; device_for(1)"
    )
    assert modules & {"urllib.request", "http.client", "psutil", "helexa.neuron.hardware.machine_description"} == set()


def test_engine_options_for_a_default_load_are_made_without_pydantic() -> None:
    program = (
        "from helexa.generation.private import EngineSettings\n"
        "EngineSettings().config().harness.torch.engine_options('cpu')"
    )
    modules = imported(program)
    assert (
        modules & {"pydantic", "helexa.core.wire.openai_chat", "helexa.neuron.requests", "helexa.neuron.grammar"}
        == set()
    )


def test_engine_process_starts_without_importing_llguidance_or_psutil() -> None:
    program = (
        "import helexa.neuron.engine.loop, helexa.neuron.engine.loading.load\n"
        "from helexa.neuron.hardware.cpus import physical_cores\n"
        "from helexa.neuron.hardware.host_memory import host_memory\n"
        "host_memory(), physical_cores()"
    )
    assert imported(program) & {"llguidance", "importlib.metadata", "email", "psutil", "pydantic"} == set()


def test_device_choice_does_not_import_pynvml_if_nvidias_library_is_missing() -> None:
    statement = (
        "from helexa.neuron.hardware import nvidia_gpus; nvidia_gpus._LIBRARY = 'libmissing.so.1'; "
        "from helexa.neuron.hardware.device_choice import device_for; device_for(1)"
    )
    assert "pynvml" not in imported(statement)


def test_import_of_the_package_helexa_imports_no_slow_modules() -> None:
    """Every process of helexa imports the package."""
    assert imported("import helexa") & {"subprocess", "json", "datetime", "logging", "asyncio"} == set()


def test_option_help_imports_neither_a_markdown_parser_nor_the_configuration() -> None:
    program = "from helexa.cli import _run; _run(['--help'])"
    modules = imported(f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): {program}\n")
    assert modules & {"markdown_it", "pygments", "pydantic", "asyncio", "numpy"} == set()


def test_server_process_of_a_node_imports_no_packages_that_only_its_other_processes_need() -> None:
    modules = imported("import helexa.neuron.app")
    assert modules & (OTHER_PROCESSES - {"jinja2"}) == set()  # the module that inspects models imports jinja2


def test_list_command_imports_neither_the_gateway_nor_commands_that_call_servers() -> None:
    modules = imported("import helexa.cli.commands.list_show_and_pull")
    unused = {"helexa.cortex", "helexa.cli.commands.ps_and_status", "helexa.cli.commands.load_and_unload", "starlette"}
    assert modules & unused == set()


def test_generate_command_starts_its_processes_before_it_imports_pydantic_and_msgspec() -> None:
    modules = imported("import helexa.cli.commands.generate")
    assert modules & {"pydantic", "orjson", "msgspec", "helexa.neuron.engine.ipc.messages"} == set()


def test_text_prompt_to_a_private_engine_is_answered_without_importing_pydantic(smollm2_gguf: Path) -> None:
    program = (
        f"import helexa; completion = helexa.generate('Hello', model={str(smollm2_gguf)!r}, target='private', "
        "max_tokens=1, temperature=0.5)\n"
        "assert completion.usage.completion == 1"
    )
    assert (
        imported(program) & {"pydantic", "pydantic_core", "helexa.core.wire.request", "helexa.core.node_reports"}
        == set()
    )


def test_garbage_collector_does_not_run_while_a_command_imports_its_modules() -> None:
    program = (
        "import gc; from helexa.__main__ import _OBJECTS; gc.set_threshold(_OBJECTS, 10, 10)\n"
        "runs = sum(generation['collections'] for generation in gc.get_stats())\n"
        "import helexa.cli.commands.generate, helexa.generation.private as private; private._import_request_modules()\n"
        "assert sum(generation['collections'] for generation in gc.get_stats()) == runs"
    )
    assert "helexa.neuron.requests.inference" in imported(program)


def test_process_that_tokenizes_reads_a_vocabulary_without_importing_numpy(smollm2_gguf: Path) -> None:
    """On 64 processors, numpy's threads reserve more address space than the process may have."""
    program = f"from helexa.neuron.text.tokenizer_process import _opened\n_opened({bytes(smollm2_gguf)!r})"
    assert imported(program) & {"numpy", "torch"} == set()
