"""Runs the compliance tests of Open Responses (tests/open_responses.py) as checks, with a real model."""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from checking import MODEL, URL, Skipped, check, run

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from open_responses import CASES, Case, specification


def _post(case: Case) -> tuple[int, str]:
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": case.stream, **case.body}
    if case.path.endswith("/compact"):
        body = {"model": MODEL, **case.body}
    if "tools" in body:
        body |= {"tool_choice": "required", "parallel_tool_calls": False}  # a small model may not call by itself
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(URL + case.path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _try(case: Case) -> None:
    if case.vision:
        raise Skipped("the model sees no images")
    status, text = _post(case)
    assert status in case.statuses, f"{status}: {text[:200]}"
    if status != 200:
        assert json.loads(text)["error"]
    elif case.stream:
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        specification().check_stream(data, case)
    else:
        specification().check_response(json.loads(text), case)


for one in CASES:

    def tried(case: Case = one) -> None:
        _try(case)

    tried.__name__ = one.name
    check(tried)

run()
