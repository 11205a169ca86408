"""The files of a hub's repository, and which of them form the model."""

import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from helexa.core.errors import SourceError
from helexa.neuron.sources.fetch_and_errors import WebError
from helexa.neuron.text.settings_and_sampling_defaults import NAMED_TEMPLATES, POOLING_FILE
from helexa.neuron.weights.gguf.files import is_companion, part_names
from helexa.neuron.weights.quantization_formats import AUTO, NAMES, is_quant

if TYPE_CHECKING:
    from helexa.neuron.sources.hub_http_client import Site

_MAX_LISTING_BYTES = 64 << 20
_HEX40 = re.compile(r"[0-9a-f]{40}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_PLAIN_SEGMENT = re.compile(r"[^\x00-\x1f\\:*?\"<>|]{1,255}")

SHARD_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_model."
_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
_TAG = re.compile(r"(?:^|[-._])((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
_PREFERENCE = (
    *("Q4_K_M", "Q4_K_L", "Q4_K_XL", "Q4_K_S", "IQ4_XS", "IQ4_NL", "MXFP4", "MXFP4_MOE", "Q4_1", "Q4_0"),
    *("Q5_K_M", "Q5_K_L", "Q5_K_XL", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q8_0", "Q8_K_XL"),
    *("BF16", "F16", "F32"),
    *("Q3_K_XL", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K_XL", "Q2_K_L", "Q2_K"),
)
"""GGUF quantizations in the order of preference, if no quantization is requested.

Quantizations with about 4 bits come first, then those with more bits, then those with fewer bits.
"""

_CHECKPOINT_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")


class _Lfs(msgspec.Struct):
    sha256: str = ""


class _Sibling(msgspec.Struct, rename={"blob_id": "blobId"}):
    rfilename: str
    size: int | None = None
    blob_id: str | None = None
    lfs: _Lfs | None = None


class _Repository(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] = []


@dataclass(frozen=True)
class RemoteFile:
    """A file in a hub's repository, as described by the hub."""

    name: str  # relative path in the repository. It has no parts, such as `..`, that lead out of the download folder.
    size: int | None  # size in bytes. None if the hub does not state the size.
    sha256: str | None
    git_id: str | None
    key: str  # name of the cache file for the content. It is the checksum, if the hub states one.

    def checksum(self) -> "hashlib._Hash | None":
        """Return a new hash object for the content; None if the hub states no checksum."""
        if self.sha256:
            return hashlib.sha256()
        if self.git_id and self.size is not None:
            return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        return None

    def is_sum(self, digest: str) -> bool:
        """Return whether `digest` equals the checksum that the hub states."""
        return digest == (self.sha256 or self.git_id)


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit, by their names."""

    commit: str
    files: Mapping[str, RemoteFile]


def request_listing(site: "Site", name: str, timeout: float) -> Listing:
    """Request the latest commit and the file list of repository `name`.

    Raises:
        WebError: the hub is unreachable, or it returned an error or an invalid response.
    """
    with site.get(f"/api/models/{name}?blobs=true", timeout=timeout) as response:
        where = response.where
        body = response.text(_MAX_LISTING_BYTES)
    try:
        repository = msgspec.json.decode(body, type=_Repository)
    except msgspec.MsgspecError:
        repository = None
    if repository is None or not _HEX40.fullmatch(repository.sha):
        raise WebError(
            where, f"{where} does not speak the protocol of the Hugging Face Hub; check the endpoint", transient=False
        )
    files = (_file(sibling, repository.sha) for sibling in repository.siblings if _is_safe(sibling.rfilename))
    return Listing(repository.sha, {file.name: file for file in files})


def _file(sibling: _Sibling, commit: str) -> RemoteFile:
    sha256 = sibling.lfs.sha256 if sibling.lfs and _HEX64.fullmatch(sibling.lfs.sha256) else None
    git_id = sibling.blob_id if sibling.blob_id and not sibling.lfs and _HEX40.fullmatch(sibling.blob_id) else None
    size = sibling.size if sibling.size is not None and sibling.size >= 0 else None
    fallback_key = hashlib.sha256(f"{commit}/{sibling.rfilename}".encode()).hexdigest()
    return RemoteFile(sibling.rfilename, size, sha256, git_id, sha256 or git_id or fallback_key)


def _is_safe(name: str) -> bool:
    """Return whether `name` is a relative path without parts such as `..`."""
    segments = name.split("/")
    plain = all(_PLAIN_SEGMENT.fullmatch(segment) and segment not in (".", "..") for segment in segments)
    return plain and len(name) < 1000


def chosen_files(source: str, names: Sequence[str], quant: str | None) -> list[str]:
    """Return the files to download: a GGUF model, or a checkpoint.

    A GGUF model may be split into several files; all are returned, even if `names` lacks some. A checkpoint consists of
    safetensors files and `config.json`. Without `quant`, the function chooses the first of the following that exists:

    1. a checkpoint,
    2. the GGUF model whose quantization comes first in `_PREFERENCE`.

    With `quant`, it chooses the first of the following that exists:

    1. the GGUF model with this quantization,
    2. a GGUF model whose file name contains `quant`, ignoring case and underscores,
    3. a checkpoint, if the engine can quantize to `quant` during loading.

    Args:
        quant: requested quantization. None or `auto` if no quantization is requested.

    Raises:
        SourceError: there are no model files (`kind` is `empty_repo`), or no file matches `quant` (`kind` is
            `quant_not_found`, and the error suggests the nearest name).
    """
    ggufs = sorted(
        (name for name in names if name.lower().endswith(".gguf") and not is_companion(name)),
        key=lambda name: (_rank(name), name),
    )
    # Skip LoRA adapters, and files with a second copy of the weights in the format of Mistral.
    skipped = (_ADAPTER, "consolidated") if SHARD_INDEX in names or _SINGLE in names else (_ADAPTER,)
    checkpoint = sorted(
        name
        for name in names
        if name == POOLING_FILE
        or name in NAMED_TEMPLATES
        or ("/" not in name and name.endswith(_CHECKPOINT_SUFFIXES) and not name.startswith(skipped))
    )
    dense = "config.json" in checkpoint and any(name.endswith(".safetensors") for name in checkpoint)
    if quant and quant.lower() != AUTO:
        matching = [name for name in ggufs if _normalized(quant) in _normalized(_file_name(name))]
        if matching:
            exact = (name for name in matching if _normalized(quant_tag(name)) == _normalized(quant))
            return part_names(next(exact, matching[0]))
        if not dense or not is_quant(quant):
            raise _quant_not_found(source, quant, ggufs, dense)
    if dense:
        return checkpoint
    if ggufs:
        return part_names(ggufs[0])
    if "adapter_config.json" in names:
        found = "only a LoRA adapter, which is not supported; name a model that has it merged"
    elif "model_index.json" in names:
        found = "an image model; name a language model"
    else:
        found = "no model files: neither .safetensors nor .gguf; name a language model"
    raise SourceError(f"{source} contains {found}", kind="empty_repo", model_id=source)


def quant_tag(name: str) -> str:
    """Return the quantization in a GGUF file's name, such as `Q4_K_M`, or ""."""
    match = _TAG.search(_file_name(name))
    return match[1].upper() if match else ""


def _rank(name: str) -> int:
    tag = quant_tag(name)
    return _PREFERENCE.index(tag) if tag in _PREFERENCE else len(_PREFERENCE)


def _quant_not_found(source: str, quant: str, ggufs: Sequence[str], dense: bool) -> SourceError:
    quant = quant[:100]  # the value comes from the client, and may be very long
    available = list(dict.fromkeys(_ENDING.sub("", _file_name(name)).rpartition("-")[2] for name in ggufs))
    offer = f"it has {', '.join(available)}" if available else "it has no .gguf files at all"
    if dense:
        available += NAMES
        offer += f"; its checkpoint can be quantized to {', '.join(NAMES)}"
    near = difflib.get_close_matches(quant.upper(), [tag.upper() for tag in available], n=1, cutoff=0.0)
    nearest = next((tag for tag in available if near and tag.upper() == near[0]), None)
    hint = f"; did you mean {nearest}?" if nearest else ""
    return SourceError(
        f"{source} has no file of quantization '{quant}': {offer}{hint}",
        kind="quant_not_found",
        model_id=source,
        requested=quant,
        available=available,
        nearest=nearest,
    )


def model_path(snapshot: Path, files: Sequence[str]) -> Path:
    """Return the path of the model: its first GGUF file, or the checkpoint folder."""
    return snapshot / files[0] if files[0].lower().endswith(".gguf") else snapshot


def _file_name(name: str) -> str:
    return PurePosixPath(name).name


def _normalized(text: str) -> str:
    return text.lower().replace("_", "")
