"""Model folders as an attacker would publish them: mutations of the files of a tiny model."""

import base64
import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

Mutation = Callable[[Path, random.Random], object]

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TEXT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
PLANTED = ("jinja2", "msgspec", "tokenizers", "torch", "sitecustomize", "usercustomize", "orjson", "modeling_tiny")
MARKER = "executed"
"""File that a planted Python file creates if it runs."""


def write_text_files(folder: Path) -> None:
    """Write a tokenizer with one token per byte, and a chat template, to the folder of a model with 512 tokens."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"eos_token": "<|end|>"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def hostile_folders(base: Path, target: Path, count: int, seed: int = 0) -> Iterator[Path]:
    """Yield `count` mutated copies of the model folder `base` in `target`. The name of a copy names its mutation.

    Every mutation occurs before one of them occurs again, with other random choices. The caller may delete a copy
    before it asks for the next one.
    """
    mutations = _mutations()
    for number in range(count):
        name, mutate = mutations[number % len(mutations)]
        folder = target / f"{number:03}-{name}"
        shutil.copytree(base, folder)
        mutate(folder, random.Random(seed * 1000 + number))
        yield folder


def _mutations() -> list[tuple[str, Mutation]]:
    """Return all mutations by name. Kinds alternate, so that the first few are of different kinds."""
    kinds = [_tokenizers(), _special_files(), _templates(), _configs(), _weights(), _python_files(), _texts()]
    ordered = [mutation for kind in kinds for mutation in kind.items()]
    positions = {
        name: index / len(kind) for kind in kinds for index, name in enumerate(kind)
    }  # spread the mutations of each kind evenly
    return sorted(ordered, key=lambda mutation: positions[mutation[0]])


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def _changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    _write(path, content)


def _tokenizer(**fields: Any) -> Mutation:
    return lambda folder, _: _changed(folder / "tokenizer.json", lambda content: content.update(fields))


def _model(**fields: Any) -> Mutation:
    return lambda folder, _: _changed(folder / "tokenizer.json", lambda content: content["model"].update(fields))


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _sequence(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(rules)}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _nested(depth: int) -> dict[str, Any]:
    rule: dict[str, Any] = {"type": "NFC"}
    for _ in range(depth):
        rule = _sequence(rule)
    return rule


def _charsmap(size: int) -> dict[str, Any]:
    content = struct.pack("<I", 1024) + bytes(1024) + b"x" * size + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def _tokenizers() -> dict[str, Mutation]:
    hundred = _replace({"String": "a"}, "a" * 100)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = {f"w{number}": 512 + number for number in range(300_000)}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "special": True}
    many = [{"id": 300 + n, "content": f"<{n}>", "normalized": False} | added for n in range(100_000)]
    long = [{"id": 300, "content": "x" * (1 << 21), "normalized": True} | added]
    special = [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}] * 100_000
    template = {"type": "TemplateProcessing", "single": special, "pair": special}
    return {
        "four growing replacements": _tokenizer(normalizer=_sequence(hundred, hundred, hundred, hundred)),
        "growth within the limit": _tokenizer(normalizer=hundred),
        "growth by an expression": _tokenizer(normalizer=_sequence(*[_replace({"Regex": "a?"}, "aa")] * 30)),
        "prefix of a megabyte": _tokenizer(normalizer={"type": "Prepend", "prepend": "a" * (1 << 20)}),
        "long replacements in a charsmap": _tokenizer(normalizer=_charsmap(1 << 20)),
        "broken charsmap": _tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "nested rules": _tokenizer(normalizer=_nested(400)),
        "backtracking split": _tokenizer(pre_tokenizer=_split("(a+)+$")),
        "backtracking replacement": _tokenizer(normalizer=_replace({"Regex": "(a|aa)+$"}, "b")),
        "look-behind split": _tokenizer(pre_tokenizer=_split(r"(?<=(a{1,99}){1,9})b|(a*)*c")),
        "invalid expression": _tokenizer(pre_tokenizer=_split("(")),
        "prefix of pieces": _model(continuing_subword_prefix="x" * (1 << 20)),
        "suffix of words": _model(end_of_word_suffix="y" * (1 << 20)),
        "large vocabulary": _model(vocab=letters | words),
        "ids above 32 bits": _model(vocab=letters | {"big": 1 << 40}),
        "sparse ids": _model(vocab=letters | {"big": (1 << 32) - 1}),
        "negative ids": _model(vocab=letters | {"small": -1}),
        "equal ids": _model(vocab=dict.fromkeys(letters, 0)),
        "empty vocabulary": _model(vocab={}),
        "merges of unknown tokens": _model(merges=["no such"] * 10_000),
        "dropout": _model(dropout=0.5),
        "cache of the model": _model(cache_capacity=1 << 40),
        "unigram without tokens": _tokenizer(model={"type": "Unigram", "vocab": [], "unk_id": 7}),
        "unigram with one long token": _tokenizer(
            model={"type": "Unigram", "vocab": [["a" * (1 << 20), 0.0]], "unk_id": 0}
        ),
        "wordpiece with long words": _tokenizer(
            model={
                "type": "WordPiece",
                "vocab": letters,
                "unk_token": "a",
                "continuing_subword_prefix": "#" * 10_000,
                "max_input_chars_per_word": 1 << 40,
            }
        ),
        "no model": _tokenizer(model=None),
        "no decoder": _tokenizer(decoder=None),
        "growing decoder": _tokenizer(
            decoder={
                "type": "Sequence",
                "decoders": [{"type": "ByteLevel"}, *[_replace({"String": "a"}, "a" * 100)] * 9],
            }
        ),
        "many added tokens": _tokenizer(added_tokens=many),
        "long added token": _tokenizer(added_tokens=long, normalizer=hundred),
        "added token without an id": _tokenizer(added_tokens=[{"content": "x"}]),
        "long post-processing": _tokenizer(post_processor=template),
        "padding to a billion": _tokenizer(
            padding={
                "strategy": {"Fixed": 10**9},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        ),
        "truncation to nothing": _tokenizer(
            truncation={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}
        ),
    }


def _special_file(name: str, make: Callable[[Path], object]) -> Mutation:
    def mutate(folder: Path, _: random.Random) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        make(path)

    return mutate


def _bind_socket(path: Path) -> None:
    here = Path.cwd()
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(path.parent)  # the path of a socket has at most 107 characters
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _special_files() -> dict[str, Mutation]:
    mutations: dict[str, Mutation] = {}
    for name in (*TEXT_FILES, "special_tokens_map.json", *WEIGHT_FILES, "model-00001-of-00002.safetensors"):
        mutations[f"fifo {name}"] = _special_file(name, os.mkfifo)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        for target in ("/dev/zero", "/dev/random", "/dev/tty", "/proc/self/mem", "/proc/kmsg"):
            device = target.replace("/", "-")
            mutations[f"link {name} to{device}"] = _special_file(
                name, lambda path, target=target: path.symlink_to(target)
            )
        mutations[f"folder {name}"] = _special_file(name, Path.mkdir)
        mutations[f"socket {name}"] = _special_file(name, _bind_socket)
        mutations[f"loop of links {name}"] = _special_file(name, lambda path: path.symlink_to(path.name))
        mutations[f"dangling link {name}"] = _special_file(name, lambda path: path.symlink_to("missing"))
        mutations[f"sparse {name}"] = _special_file(name, _sparse)
    return mutations


def _template(source: str) -> Mutation:
    return lambda folder, _: (folder / "chat_template.jinja").write_text(source)


def _templates() -> dict[str, Mutation]:
    loops = "{% for a in range(99999) %}" * 4 + "x" + "{% endfor %}" * 4
    recursion = "{% macro m(n) %}{{ m(n - 1) }}{{ m(n - 1) }}{% endmacro %}{{ m(100) }}"
    quadratic = "{% set n = namespace(s='x' * 999999) %}{% for a in range(999) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    return {
        "endless loops": _template(loops),
        "endless recursion": _template(recursion),
        "memory by repetition": _template("{{ 'x' * 10**10 }}"),
        "memory by concatenation": _template(quadratic),
        "memory by a list": _template("{{ range(10**9) | list }}"),
        "long output": _template("{% for a in range(10**7) %}xxxxxxxxxx{% endfor %}"),
        "large power": _template("{{ 9 ** (9 ** 9) }}"),
        "internal attributes": _template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        "import": _template("{% import 'os' as os %}{{ os.system('true') }}"),
        "unclosed block": _template("{% for a in messages %}"),
        "raised error": _template("{{ raise_exception('x' * 100000) }}"),
        "long source": _template("{# " + "x" * (2 << 20) + " #}"),
        "deep expression": _template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
        "many blocks": _template("{% if a %}" * 2000 + "{% endif %}" * 2000),
    }


def _config(**fields: Any) -> Mutation:
    return lambda folder, _: _changed(folder / "config.json", lambda content: content.update(fields))


def _configs() -> dict[str, Mutation]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
    values = (0, -1, 1 << 62, 1.5, "many", None, [])

    def other_value(folder: Path, random: random.Random) -> None:
        _changed(folder / "config.json", lambda content: content.update({random.choice(names): random.choice(values)}))

    return {
        "huge hidden size": _config(hidden_size=1 << 40, intermediate_size=1 << 40),
        "million layers": _config(num_hidden_layers=1_000_000),
        "no heads": _config(num_attention_heads=0),
        "more heads than width": _config(num_attention_heads=10_000, num_key_value_heads=10_000),
        "context of 10**18": _config(max_position_embeddings=10**18),
        "rope by zero": _config(rope_theta=0.0, rope_parameters={"rope_type": "linear", "factor": 0.0}),
        "unknown architecture": _config(model_type="../../etc/passwd\n", architectures=["__import__"]),
        "code of the model": _config(auto_map={"AutoModelForCausalLM": "modeling_tiny.Model"}),
        "quantization of another kind": _config(quantization_config={"quant_method": "awq", "bits": [1] * 1000}),
        "no such dtype": _config(dtype="float4096", torch_dtype={}),
        "end tokens": _config(eos_token_id=list(range(100_000))),
        "vision of a text model": _config(vision_config={"hidden_size": "x", "patch_size": 0}),
        "text config in text config": _config(text_config={"text_config": {}}),
        "other value": other_value,
        "other value again": other_value,
        "other value a third time": other_value,
    }


def _header(header: object, length: int | None = None, rest: bytes = b"") -> Mutation:
    def mutate(folder: Path, _: random.Random) -> None:
        content = header if isinstance(header, bytes) else json.dumps(header).encode()
        size = struct.pack("<Q", len(content) if length is None else length)
        (folder / "model.safetensors").write_bytes(size + content + rest)

    return mutate


def _index(weight_map: object) -> Mutation:
    def mutate(folder: Path, _: random.Random) -> None:
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        _write(folder / "model.safetensors.index.json", {"weight_map": weight_map})

    return mutate


def _noise(name: str) -> Mutation:
    def mutate(folder: Path, random: random.Random) -> None:
        content = bytearray((folder / name).read_bytes())
        for _ in range(20):
            content[random.randrange(len(content))] = random.randrange(256)
        (folder / name).write_bytes(content)

    return mutate


def _truncated(name: str) -> Mutation:
    def mutate(folder: Path, random: random.Random) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: random.randrange(len(content))])

    return mutate


def _gguf(content: bytes) -> Mutation:
    def mutate(folder: Path, _: random.Random) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / "config.json").write_text("{}")
        (folder / "model.gguf").write_bytes(content)

    return mutate


def _weights() -> dict[str, Mutation]:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    many = {f"t{number}": tensor for number in range(100_000)}
    key = struct.pack("<Q", 1) + b"k"
    arrays = key + struct.pack("<IIQ", 9, 9, 1 << 20) + struct.pack("<IQ", 9, 1 << 20) * 100_000
    magic = b"GGUF" + struct.pack("<I", 3)
    return {
        "header of 2**63 bytes": _header({}, length=1 << 63),
        "header of many lists": _header(b"{" + b'"a":' + b"[" * 100_000, rest=b""),
        "tensors at one place": _header(many, rest=bytes(8)),
        "shape above the file": _header({"w": {"dtype": "F32", "shape": [1 << 40] * 4, "data_offsets": [0, 8]}}),
        "negative offsets": _header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}),
        "empty weights": _header({}),
        "index outside the folder": _index({"w": "../../../../etc/passwd"}),
        "index of a device": _index({"w": "/dev/zero"}),
        "index of missing files": _index({f"w{n}": f"s{n}.safetensors" for n in range(10_000)}),
        "index of other names": _index({"model.embed_tokens.weight": "shard.safetensors"}),
        "index without a map": _index([1, 2, 3]),
        "noise in weights": _noise("model.safetensors"),
        "noise in weights again": _noise("model.safetensors"),
        "truncated weights": _truncated("model.safetensors"),
        "gguf of many tensors": _gguf(magic + struct.pack("<QQ", 1 << 60, 0)),
        "gguf of many keys": _gguf(magic + struct.pack("<QQ", 0, 1 << 60)),
        "gguf of nested arrays": _gguf(magic + struct.pack("<QQ", 0, 1) + arrays),
        "gguf of a long string": _gguf(magic + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 62)),
        "gguf of noise": _gguf(magic + random.Random(1).randbytes(100_000)),
    }


def _planted(*names: str) -> Mutation:
    def mutate(folder: Path, _: random.Random) -> None:
        marker = folder.parent / MARKER
        for name in names:
            (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")

    return mutate


def _python_files() -> dict[str, Mutation]:
    mutations = {f"planted {name}.py": _planted(name) for name in PLANTED}
    return mutations | {"planted __init__.py": _planted("__init__", "conftest")}


def _text(name: str, content: bytes) -> Mutation:
    return lambda folder, _: (folder / name).write_bytes(content)


def _texts() -> dict[str, Mutation]:
    mutations: dict[str, Mutation] = {}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        mutations[f"empty {name}"] = _text(name, b"")
        mutations[f"zeros in {name}"] = _text(name, bytes(100_000))
        mutations[f"nested lists in {name}"] = _text(name, b"[" * 1_000_000)
        mutations[f"many lists in {name}"] = _text(name, b'{"a":[' + b"[]," * 4_000_000 + b"[]]}")
        mutations[f"many numbers in {name}"] = _text(name, b'{"a":[' + b"1," * 7_000_000 + b"1]}")
        mutations[f"many keys in {name}"] = _text(name, json.dumps({f"k{n}": n for n in range(500_000)}).encode())
        mutations[f"truncated {name}"] = _truncated(name)
        mutations[f"noise in {name}"] = _noise(name)
    mutations["infinite numbers"] = _text("generation_config.json", b'{"temperature": 1e999, "top_p": NaN}')
    mutations["no tokenizer"] = lambda folder, _: (folder / "tokenizer.json").unlink()
    mutations["no config"] = lambda folder, _: (folder / "config.json").unlink()
    return mutations
