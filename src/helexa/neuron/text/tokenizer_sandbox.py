"""Read a model's text files and tokenize in a sandbox process of the model."""

import array
import os
from pathlib import Path
from typing import Literal

import msgspec

from helexa.core.errors import ModelFileError, service_unavailable
from helexa.neuron.processes.sandbox import LimitExceeded, ProcessPool, Sandbox, SandboxError
from helexa.neuron.text import TOKENIZER_PROCESS
from helexa.neuron.text.settings_and_sampling_defaults import TextSettings
from helexa.neuron.text.tokenizer import TOKEN_ITEM, TextRequest

# Maximum CPU time for tokenizing a short text, in seconds. Long texts get `SECONDS_PER_BYTE` in addition.
ENCODE_SECONDS = 5.0

SECONDS_PER_BYTE = 10e-6

MAX_TEXT_BYTES = 32 << 20  # maximum size of a text in UTF-8

_RETRY_SECONDS = 1


class TokenizerSandbox:
    """An `Encoder` that tokenizes in a sandbox process of one model. Thread-safe.

    The process starts at the first request. If it exceeds a limit, it ends, and the next request starts a new process.
    It also ends when this object is deleted.

    Args:
        path: a .gguf file, a directory with a tokenizer.json, or a directory with one GGUF model.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fsencode(path)
        self._sandbox = Sandbox(ProcessPool(TOKENIZER_PROCESS, kept=1), processes=1)

    def settings(self) -> TextSettings:
        """Return the text settings that the model's files define.

        Raises:
            ModelFileError: the files are malformed or not supported, or reading them exceeds a limit.
        """
        try:
            response = self._request(TextRequest(self._path, "open"), b"")
        except SandboxError as error:
            raise ModelFileError(
                f"reading the model's text files failed: {error}", advice="try again, or download the model again"
            ) from error
        return msgspec.msgpack.decode(response, type=TextSettings)

    def end_process(self) -> None:
        """End the process, if it works on no request. The next request starts a new one."""
        self._sandbox.end_idle()

    def ids(self, text: str, *, parse_special: bool, continues: bool) -> list[int]:
        """Return the token ids of a text from the sandbox process (see `Encoder.ids`).

        Raises:
            ModelFileError: the tokenizer fails or exceeds a limit, or the text is longer than `MAX_TEXT_BYTES`.
            ApiError: status 503: the process ended for another reason.
        """
        return self._tokens("ids", text, parse_special=parse_special, continues=continues).tolist()

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) of each token in characters. Raises the errors of `ids`."""
        indices = self._tokens("spans", text)
        return list(zip(indices[::2], indices[1::2], strict=True))

    def _tokens(self, kind: Literal["ids", "spans"], text: str, **options: bool) -> "array.array[int]":
        encoded = text.encode("utf-8", "surrogatepass")
        if len(encoded) > MAX_TEXT_BYTES:
            raise ModelFileError(
                f"the text has {len(encoded)} bytes, more than {MAX_TEXT_BYTES >> 20} MiB", advice="shorten the text"
            )
        seconds = ENCODE_SECONDS + len(encoded) * SECONDS_PER_BYTE
        tokens = array.array(TOKEN_ITEM)
        try:
            tokens.frombytes(self._request(TextRequest(self._path, kind, seconds, **options), encoded))
        except LimitExceeded as error:
            raise ModelFileError(
                f"the tokenizer failed: {error}", advice="shorten the text, or use another model"
            ) from error
        except SandboxError as error:  # not the fault of the text: for example, the system had no memory left
            raise service_unavailable(f"the tokenizer failed: {error}; try again", _RETRY_SECONDS) from error
        return tokens

    def _request(self, request: TextRequest, text: bytes) -> bytes:
        response = self._sandbox.request(msgspec.json.encode(request) + b"\n" + text)
        if response[:1] != b"=":
            raise ModelFileError(response[1:].decode(), advice="")  # the process's message already has advice
        return response[1:]
