"""Sandbox process that reads a model's text files and tokenizes.

The files are untrusted. Rules in `tokenizer.json` can multiply the length of a text or run for hours. The `tokenizers`
library is native code and holds Python's interpreter lock while it applies the rules. This process has limits on memory
and CPU time, so that untrusted rules cannot stop the server. `TokenizerSandbox` starts the process.
"""

import array
import gc
import os
from functools import lru_cache
from pathlib import Path

import msgspec

from helexa.core.errors import ModelFileError
from helexa.neuron.processes import heaps_and_shared_memory
from helexa.neuron.processes.inside_sandbox import cpu_time_limit, serve
from helexa.neuron.text.encoder import BackendEncoder
from helexa.neuron.text.settings_and_sampling_defaults import TextSettings
from helexa.neuron.text.tokenizer import TOKEN_ITEM, TextRequest
from helexa.neuron.text.tokenizer_files import read_text_files

MAX_MEMORY = 2 << 30  # maximum growth of the process's address space after its start, in bytes

OPEN_SECONDS = 60.0  # maximum CPU time for reading the files of a model, in seconds

_LARGE = 1 << 20  # bytes of a text after which freed memory is returned to the operating system


def main() -> None:
    """In the tokenizer process, answer requests from standard input."""
    serve(_respond, MAX_MEMORY)


def _respond(body: bytes) -> bytes:
    """Return the response to a request: `=` and the result, or `!` and an error."""
    head, _, text = body.partition(b"\n")
    request = msgspec.json.decode(head, type=TextRequest)
    try:
        with cpu_time_limit(OPEN_SECONDS):
            settings, encoder = _opened(request.path)
            if request.kind == "open":
                return b"=" + msgspec.msgpack.encode(settings)
        with cpu_time_limit(request.seconds):
            return b"=" + _tokens(encoder, request, text.decode("utf-8", "surrogatepass"))
    except ModelFileError as error:
        return b"!" + str(error).encode("utf-8", "replace")
    finally:
        if len(text) > _LARGE:
            heaps_and_shared_memory.trim_heaps()


def _tokens(encoder: BackendEncoder, request: TextRequest, text: str) -> bytes:
    if request.kind == "ids":
        ids = encoder.ids(text, parse_special=request.parse_special, continues=request.continues)
        return array.array(TOKEN_ITEM, ids).tobytes()
    return array.array(TOKEN_ITEM, [index for span in encoder.spans(text) for index in span]).tobytes()


@lru_cache(1)
def _opened(path: bytes) -> tuple[TextSettings, BackendEncoder]:
    # All objects of a vocabulary stay alive, and the garbage collector would take a fifth of the time to scan them.
    gc.disable()
    try:
        return read_text_files(Path(os.fsdecode(path)))
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    main()
