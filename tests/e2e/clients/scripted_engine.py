"""A process that speaks the engine's protocol without a model; the prompt contains the text to generate.

The last `say:<hex>,<hex>,...` of a prompt lists the completions: the first is generated if no tool result follows, the
second after one tool result, and so on. A prompt without such a list gets "ok". A completion that starts with thinking
continues a thinking block that the prompt has opened, and loses its thinking if the prompt has closed the block. A
completion without thinking closes an open block. Each request is appended as a line of JSON to `<model>.asked`.
"""

import argparse
import json
import re
import socket
from pathlib import Path

import msgspec
import tokenizers

from helexa.neuron.engine.ipc.message_and_pixel_sockets import FrameDecoder, encode, receive
from helexa.neuron.engine.ipc.messages import Generate, Load, Ready, Shutdown, StepReport, Timing, ToEngine, TokenOutput
from helexa.neuron.processes import parent_watch

CONTEXT = 1 << 17
TIMING = Timing(queue_ms=1.0, prefill_ms=10.0, decode_ms=20.0)
_SAY = re.compile(r"say:([0-9a-f]+(?:,[0-9a-f]+)*)")
_RESULT = "<|im_start|>tool\n"


def say(*texts: str) -> str:
    """Return prompt text that makes the model generate `texts` in order, the next one after each tool result."""
    return "say:" + ",".join([text.encode().hex() for text in texts])


def completion_for(prompt: str) -> str:
    """Return the text that the model generates for a prompt."""
    markers = list(_SAY.finditer(prompt))
    if not markers:
        return "ok"
    texts = markers[-1][1].split(",")
    results = prompt.count(_RESULT, markers[-1].end())
    text = bytes.fromhex(texts[min(results, len(texts) - 1)]).decode()
    if prompt.endswith("<think>\n"):
        return text.removeprefix("<think>\n") if text.startswith("<think>\n") else f"</think>\n\n{text}"
    return text.rpartition("</think>\n\n")[2] if prompt.endswith("</think>\n\n") else text


class SayingEngine:
    """Answers requests one at a time."""

    def __init__(self, connection: socket.socket, model: Path, context: int) -> None:
        self._connection = connection
        self._context = context
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._requests_file = model.with_suffix(".asked")
        self._requests_file.touch()

    def serve(self) -> None:
        """Handle messages until the server sends `Shutdown` or closes the connection."""
        self._send(
            Ready(
                model_type="saying",
                device="cpu",
                dtype="float32",
                kernels="none",
                context_length=self._context,
                vocab_size=self._tokenizer.get_vocab_size(),
                kv_pages=CONTEXT // 16,
                page_size=16,
                weight_bytes=1,
                kv_bytes=1,
            )
        )
        decoder = FrameDecoder(ToEngine)
        while data := self._connection.recv(1 << 16):
            for message in decoder.feed(data):
                if isinstance(message, Generate):
                    self._generate(message)
                elif isinstance(message, Shutdown):
                    return

    def _generate(self, request: Generate) -> None:
        prompt = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        tokens = [*self._tokenizer.encode(completion_for(prompt)).ids, self._tokenizer.token_to_id("<|im_end|>")]
        finish = "stop" if len(tokens) <= request.max_tokens else "length"
        fields = msgspec.to_builtins(request) | {"prompt": prompt}
        fields |= {"prompt_tokens": len(request.prompt), "completion_tokens": min(len(tokens), request.max_tokens)}
        with self._requests_file.open("a") as file:
            file.write(json.dumps(fields) + "\n")
        *tokens_before_last, last = tokens[: request.max_tokens]
        for token in tokens_before_last:
            self._report(TokenOutput(id=request.id, tokens=[token]))
        self._report(TokenOutput(id=request.id, tokens=[last], finish=finish, timing=TIMING))

    def _report(self, output: TokenOutput) -> None:
        self._send(StepReport(outputs=[output], running=1, waiting=0, free_pages=CONTEXT // 16))

    def _send(self, message: Ready | StepReport) -> None:
        self._connection.sendall(encode(message))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--pixels-fd", type=int)
    parser.add_argument("--heartbeat-fd", type=int)
    arguments = parser.parse_args()
    parent_watch.start()
    connection = socket.socket(fileno=arguments.fd)
    load = receive(connection, Load)
    SayingEngine(connection, Path(load.model), load.options.context_length or CONTEXT).serve()


if __name__ == "__main__":
    main()
