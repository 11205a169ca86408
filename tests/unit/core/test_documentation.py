"""Code blocks of the documentation: Python compiles, commands and their options exist, configurations are valid.

tests/integration/generation/test_documentation_examples.py runs the Python blocks of README.md and docs/library.md.
"""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml
from cyclopts import App, CycloptsError
from pydantic import BaseModel, ValidationError

from helexa.acp import config as acp_config
from helexa.bench.config import BenchConfig
from helexa.core.catalog import Catalog
from helexa.cortex.api.openapi import document
from helexa.cortex.config import CortexConfig
from helexa.cortex.routes.ollama_and_keep_alive import OLLAMA_ENDPOINTS, ollama_routes
from helexa.neuron.config import NeuronConfig

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)(`{3,})([a-z]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
SCHEMAS: tuple[type[BaseModel], ...] = (CortexConfig, NeuronConfig, Catalog, BenchConfig)
FOREIGN_TOML = ("model_provider = ",)  # configurations of other programs
NODE_PATHS = ("/health", "/models/load")
OPERATORS = {"|", "&&", "||", ";", "&", "<", ">", ">>", "2>&1"}


class Block(NamedTuple):
    """A code block of a page, which begins in line `line`."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[3] in languages:
                line = text[: match.start()].count("\n") + 2
                content = re.sub(f"^{match[1]}", "", match[4], flags=re.MULTILINE)
                yield Block(str(path.relative_to(ROOT)), line, match[3], content)


def each(*languages: str) -> Any:
    return pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in blocks(*languages)])


@each("python", "py")
def test_python_blocks_of_the_documentation_compile(block: Block) -> None:
    compile("\n" * (block.line - 1) + block.text, block.page, "exec", dont_inherit=True)


@each("toml")
def test_toml_blocks_of_the_documentation_are_valid_configurations(block: Block) -> None:
    content = tomllib.loads(block.text)
    if any(mark in block.text for mark in FOREIGN_TOML):
        return
    if block.page == "docs/acp.md":
        acp_config.parse(block.text, block.page, {})
        return
    problems = [problem for schema in SCHEMAS if (problem := problem_of(schema, content)) is not None]
    assert len(problems) < len(SCHEMAS), f"{block}: {problems}"


def problem_of(schema: type[BaseModel], content: dict[str, Any]) -> str | None:
    try:
        schema.model_validate(content)
    except ValidationError as error:
        return f"{schema.__name__}: {error.errors()[0]['loc']} {error.errors()[0]['msg']}"
    return None


@each("json")
def test_json_blocks_of_the_documentation_are_valid_json(block: Block) -> None:
    text = block.text
    for pattern, replacement in ((r"\{\.\.\.\}", "{}"), (r": \.\.\.", ": 0"), (r",\s*\.\.\.", "")):
        text = re.sub(pattern, replacement, text)  # three dots stand for omitted values
    try:
        json.loads(text)
    except json.JSONDecodeError:
        for line in filter(None, text.splitlines()):  # one value per line
            json.loads(line)


@each("yaml")
def test_yaml_blocks_of_the_documentation_are_valid_yaml(block: Block) -> None:
    assert list(yaml.safe_load_all(block.text))


def test_shell_blocks_of_the_documentation_have_valid_syntax() -> None:
    for block in blocks("sh"):
        checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, f"{block}: {checked.stderr}"


def command_lines(block: Block) -> Iterator[str]:
    """Yield the commands of a shell block, or of a transcript, in which a command follows `$ `."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        if block.language == "sh":
            yield line
        elif line.startswith("$ "):
            yield line.removeprefix("$ ")


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command, without variables before it, `sudo` and redirections."""
    for line in command_lines(block):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            assert block.language == "text", str(block)  # a quoted argument of a transcript has several lines
            continue
        while words:
            end = next((index for index, word in enumerate(words) if word in OPERATORS), len(words))
            command, words = words[:end], words[end + 1 :]
            while command and re.match(r"[A-Z_]+=", command[0]):
                del command[0]
            if command[:1] == ["sudo"]:
                command = command[3 if command[1] == "-u" else 1 :]
            if command:
                yield command


def programs() -> dict[str, App]:
    import helexa.bench.cli
    import helexa.cli
    import helexa.cortex.cli
    import helexa.neuron.cli

    return {
        "helexa": helexa.cli.app,
        "cortex": helexa.cortex.cli.app,
        "neuron": helexa.neuron.cli.app,
        "helexa-bench": helexa.bench.cli.app,
    }


def test_documented_commands_and_options_exist() -> None:
    known, count = programs(), 0
    for block in blocks("sh", "text", "console"):
        for command in commands(block):
            if (app := known.get(Path(command[0]).name)) is None:
                continue
            tokens = [word for word in command[1:] if word != "--debug"]
            if tokens == ["--version"]:
                continue
            try:
                app.parse_args(tokens, exit_on_error=False, print_error=False)
            except CycloptsError as error:
                pytest.fail(f"{block}: {shlex.join(command)}: {error}")
            count += 1
    assert count > 50


def test_documented_make_targets_and_scripts_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in blocks("sh"):
        for command in commands(block):
            if command[0] == "make":
                assert [word for word in command[1:] if "=" not in word and word not in targets] == [], str(block)
            for word in command:
                if word.startswith(("perf/", "deploy/", "tests/", "examples/")) and "*" not in word and "{" not in word:
                    assert (ROOT / word).exists() or word == "deploy/docker/.env", f"{block}: {word}"


def test_documented_requests_match_the_openapi_document() -> None:
    openapi = document()
    count = 0
    for block in blocks("sh"):
        for command in commands(block):
            if command[0] != "curl":
                continue
            url = urlsplit(next(word for word in command if word.startswith("http")))
            data = next((command[index + 1] for index, word in enumerate(command) if word == "-d"), None)
            if block.page == "docs/api/ollama.md":
                assert url.path in {route.path for route in ollama_routes} | OLLAMA_ENDPOINTS.keys(), str(block)
            elif url.port == 31313:
                check_request(openapi, str(block), url.path, None if data is None else json.loads(data))
                count += 1
            else:
                assert url.path in NODE_PATHS, str(block)
    assert count > 15


def check_request(openapi: dict[str, Any], block: str, path: str, body: Any) -> None:
    method = "get" if body is None else "post"
    patterns = {template: re.sub(r"{\w+}", ".+", template) for template in openapi["paths"]}
    matches = [template for template, pattern in patterns.items() if re.fullmatch(pattern, path)]
    operations = [openapi["paths"][template][method] for template in matches if method in openapi["paths"][template]]
    assert operations, f"{block}: the gateway has no {method.upper()} {path}"
    if body is not None and "requestBody" in operations[0]:
        schema = operations[0]["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.validate(body, schema | {"components": openapi["components"]})


def test_links_of_the_documentation_lead_to_existing_files_and_headings() -> None:
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for path, anchor in LINK.findall(text):
            target = (page.parent / path) if path else page
            assert target.exists(), f"{page.name}: {path} does not exist"
            if anchor and target.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", FENCE.sub("", target.read_text(encoding="utf-8")), re.MULTILINE)
                assert anchor in set(map(anchor_of, headings)), f"{page.name}: {path}#{anchor} does not exist"


def test_each_documentation_page_is_in_the_index_and_in_the_site() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT)) in site, page.name


def test_readme_has_at_most_200_lines_and_names_the_repository_address_once() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert "helexa run" in text[: text.index("## A server")]
    assert [line for line in text.splitlines() if "REPOSITORY" in line] == [
        "git clone REPOSITORY helexa && cd helexa          # REPOSITORY: the address of this repository"
    ]


def test_documentation_pages_agree_about_the_default_model_and_python_versions() -> None:
    versions = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    supported = f"Python {', '.join(versions[:-1])} or {versions[-1]}"
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        sizes = [size for line in lines for size in re.findall(r"model of (\d\d) MB|a (\d\d) MB model", line)]
        assert {size for pair in sizes for size in pair if size} <= {"98"}, page.name
        assert not [line for line in lines if re.search(r"Python 3\.\d+ (or newer|and newer)", line)], page.name
    for page in ("README.md", "CONTRIBUTING.md", "docs/install.md"):
        assert supported in " ".join((ROOT / page).read_text(encoding="utf-8").split()), page


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
