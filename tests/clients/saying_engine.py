"""A process that speaks the engine's protocol without a model: what it is to say stands in its prompt.

The last `say:<hex>,<hex>,...` in a prompt is what it says, a token at a time: the first before any result of a tool,
the second after one, and so on. Without one it says "ok". A thought that a text begins with is gone on with where the
prompt has opened one, and left out where the prompt has closed it; a text without one ends what was opened. What the
engine was asked is written to `<model>.asked`, a JSON object per line.
"""

import argparse
import json
import re
import socket
from pathlib import Path

import msgspec
import tokenizers

from helexa.neuron.engine.ipc.frames import FrameDecoder, encode, receive
from helexa.neuron.engine.ipc.messages import Generate, Load, Ready, Shutdown, StepReport, Timing, ToEngine, TokenOutput
from helexa.neuron.processes import parent_death

CONTEXT = 1 << 17
TIMING = Timing(queue_ms=1.0, prefill_ms=10.0, decode_ms=20.0)
_SAY = re.compile(r"say:([0-9a-f]+(?:,[0-9a-f]+)*)")
_RESULT = "<|im_start|>tool\n"


def say(*texts: str) -> str:
    """What makes the model say the first text, and when it has called a tool, the next one."""
    return "say:" + ",".join([text.encode().hex() for text in texts])


def said_to(prompt: str) -> str:
    """What the model says to a prompt."""
    found = list(_SAY.finditer(prompt))
    if not found:
        return "ok"
    texts = found[-1][1].split(",")
    results = prompt.count(_RESULT, found[-1].end())
    text = bytes.fromhex(texts[min(results, len(texts) - 1)]).decode()
    if prompt.endswith("<think>\n"):
        return text.removeprefix("<think>\n") if text.startswith("<think>\n") else f"</think>\n\n{text}"
    return text.rpartition("</think>\n\n")[2] if prompt.endswith("</think>\n\n") else text


class SayingEngine:
    """Answers one request after the other."""

    def __init__(self, connection: socket.socket, model: Path, context: int) -> None:
        self._connection = connection
        self._context = context
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._asked = model.with_suffix(".asked")
        self._asked.touch()

    def serve(self) -> None:
        """Take requests until the server wants no more."""
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
                    self._answer(message)
                elif isinstance(message, Shutdown):
                    return

    def _answer(self, request: Generate) -> None:
        prompt = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        tokens = [*self._tokenizer.encode(said_to(prompt)).ids, self._tokenizer.token_to_id("<|im_end|>")]
        finish = "stop" if len(tokens) <= request.max_tokens else "length"
        fields = msgspec.to_builtins(request) | {"prompt": prompt}
        fields |= {"prompt_tokens": len(request.prompt), "said_tokens": min(len(tokens), request.max_tokens)}
        with self._asked.open("a") as file:
            file.write(json.dumps(fields) + "\n")
        *before, last = tokens[: request.max_tokens]
        for token in before:
            self._report(TokenOutput(id=request.id, tokens=[token]))
        self._report(TokenOutput(id=request.id, tokens=[last], finish=finish, timing=TIMING))

    def _report(self, output: TokenOutput) -> None:
        self._send(StepReport(outputs=[output], running=1, waiting=0, free_pages=CONTEXT // 16))

    def _send(self, message: Ready | StepReport) -> None:
        self._connection.sendall(encode(message))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--heartbeat-fd", type=int)
    arguments = parser.parse_args()
    parent_death.hold()
    connection = socket.socket(fileno=arguments.fd)
    load = receive(connection, Load)
    SayingEngine(connection, Path(load.model), load.options.context_length or CONTEXT).serve()


if __name__ == "__main__":
    main()
