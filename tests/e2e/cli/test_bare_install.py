"""Commands in an installation without extras print one line with the missing extra and how to install it."""

import subprocess

import pytest
from gguf import GGUFWriter

from bare_venv import bare_venv


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return bare_venv(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture
def run(python, environ, tmp_path):
    variables = environ | {"HELEXA_CACHE": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "hub")}

    def run(*arguments):
        model = GGUFWriter(tmp_path / "tiny.gguf", "llama")
        model.write_header_to_file()
        model.write_kv_data_to_file()
        model.close()
        return subprocess.run(
            [str(python), "-m", *arguments],
            cwd=tmp_path,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("helexa up", "neuron"),
        ("helexa generate --private Hello", "neuron"),
        ("helexa run helexa/small Hello --private", "neuron"),
        ("helexa pull helexa/small", "neuron"),
        ("helexa show ./tiny.gguf", "neuron"),
        ("helexa doctor", "neuron"),
        ("helexa bench once", "bench"),
        ("helexa acp", "acp"),
        ("helexa.neuron", "neuron"),
        ("helexa.bench once", "bench"),
    ],
)
def test_command_without_its_optional_packages_prints_one_line_that_names_the_pip_extra(run, command, extra):
    result = run(*command.split())
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.endswith(f" is not installed; install it with: pip install 'helexa[{extra}]'\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "content", "command"),
    [
        ("uv-receipt.toml", "", "uv tool install 'helexa[neuron]'"),
        ("pipx_metadata.json", "{}", "pipx install --force 'helexa[neuron]'"),
        (
            "pyvenv.cfg",
            "home = HOME\ninclude-system-site-packages = false\nuv = 0.13.9\n",
            "uv pip install 'helexa[neuron]'",
        ),
    ],
)
def test_message_about_a_missing_pip_extra_has_the_install_command_of_uv_tool_or_pipx(
    tmp_path, environ, file, content, command
):
    python = bare_venv(tmp_path / "venv")
    (tmp_path / "venv" / file).write_text(content.replace("HOME", str(python.resolve().parent)))
    doctor = [str(python), "-m", "helexa", "doctor"]
    result = subprocess.run(doctor, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert result.stderr.endswith(f" is not installed; install it with: {command}\n")


@pytest.mark.parametrize("command", ["helexa list", "helexa completion bash", "helexa --help", "helexa.cortex --help"])
def test_command_without_optional_dependencies_works_in_a_bare_install(run, command):
    result = run(*command.split())
    assert result.returncode == 0, result.stderr


def test_library_without_the_engine_packages_raises_an_error_that_names_the_pip_extra(python, environ):
    code = "import helexa\ntry: helexa.pull('helexa/small')\nexcept helexa.HelexaError as error: print(error)"
    result = subprocess.run([str(python), "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert result.stdout.endswith("install it with: pip install 'helexa[neuron]'\n")
