"""Generates one image: measures its duration and checks whether the response is a PNG."""

import base64
from dataclasses import dataclass
from typing import Any, ClassVar

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.request_record import RequestRecord
from helexa.bench.scenarios.scenario import Outcome, Subject
from helexa.bench.targets.http import JsonCalls
from helexa.bench.targets.target import Control, ServedModel, TargetError

_PROMPT = "A red lighthouse on a cliff above a calm sea at dawn"
_SEED = 42
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Image:
    """A request for a square image with a fixed prompt and a fixed seed."""

    warms_up: ClassVar[bool] = True

    pixels: int

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {"pixels": self.pixels, "prompt": _PROMPT, "seed": _SEED}
        return ScenarioKey(f"image:{self.pixels}", "image", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates images."""
        return "image" in model.capabilities

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Request the image and measure the time until the response is complete."""
        client, now = subject.client, subject.clock.now
        calls = JsonCalls(client.session, client.endpoint, client.api_format.headers(client.bearer))
        body = {
            "model": subject.model.name,
            "prompt": _PROMPT,
            "size": f"{self.pixels}x{self.pixels}",
            "n": 1,
            "seed": _SEED,
            "response_format": "b64_json",
        }
        sent, error, answer = now(), None, None
        try:
            answer = await calls.post("/v1/images/generations", body, client.timeout_secs)
        except TargetError as target_error:
            error = str(target_error)
        ended = now()
        if error is None and not _is_png(answer):
            error = "the answer is no PNG image"
        record = RequestRecord(sent, sent, ended, "error" if error else "ok", error=error)
        usage = answer.get("usage") if isinstance(answer, dict) else None
        return Outcome([record], error=error, columns={"e2e_s": ended - sent}, extra={"image_usage": usage})


def _is_png(answer: Any) -> bool:
    try:
        return base64.b64decode(answer["data"][0]["b64_json"], validate=True).startswith(_PNG)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
