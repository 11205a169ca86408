"""The API over HTTP."""

import csv
import io
import json
import urllib.error
import urllib.request

import orjson
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from helexa.bench.api_queries import QUESTIONS
from helexa.bench.results import capacity_and_scaling, series
from helexa.bench.results.summary_and_dimensions import summary
from helexa.bench.store.writer import Store

BEAST = "host=beast&model=Qwen/Qwen3-8B"
QUERIES = {
    "series": "model=Qwen/Qwen3-8B&scenario=single:cold:4096",
    "compare": "a=@beast&b=@closet&metric=ttft_s",
    "run": "id=1",
    "requests": "run=1",
}


def get(url: str):
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.headers, response.read()


def error_response(url: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=60)
    with caught.value as response:
        assert response.headers["content-type"].startswith("text/plain")
        assert response.headers["access-control-allow-origin"] == "*"
        return response.code, response.read().decode()


def test_responses_match_the_openapi_document(site):
    document = json.loads(get(f"{site}/openapi.json")[1])
    validate(document)
    for query in QUESTIONS:
        headers, body = get(f"{site}/api/v1/{query.path}?{QUERIES.get(query.path, '')}")
        assert headers["access-control-allow-origin"] == "*"
        content = document["paths"][f"/api/v1/{query.path}"]["get"]["responses"]["200"]["content"]
        schema = content["application/json"]["schema"] | {"components": document["components"]}
        Draft202012Validator(schema).validate(json.loads(body))


@pytest.mark.parametrize(
    "path", ["health", "dimensions", "summary", "scaling", "concurrency", "swap", "capability", "runs"]
)
def test_api_paths_without_a_version_return_the_same_response_as_paths_with_v1(site, path):
    assert get(f"{site}/api/{path}")[1] == get(f"{site}/api/v1/{path}")[1]


def test_api_returns_the_results_of_the_analysis_functions(site, archive):
    for path, expected in (
        ("summary", summary(archive)),
        (f"scaling?{BEAST}", capacity_and_scaling.scaling(archive, target="beast", model="Qwen/Qwen3-8B")),
        (f"concurrency?{BEAST}", capacity_and_scaling.capacity(archive, target="beast", model="Qwen/Qwen3-8B")),
        (
            f"series?{BEAST}&scenario=single:warm:128",
            [series.series(archive, "beast", "Qwen/Qwen3-8B", "single:warm:128", "output_tps_user")],
        ),
    ):
        assert expected
        assert get(f"{site}/api/v1/{path}")[1] == orjson.dumps(expected)


def test_csv_of_runs_has_the_same_rows_as_json(site):
    rows = json.loads(get(f"{site}/api/v1/runs?host=beast&limit=20")[1])
    headers, text = get(f"{site}/api/v1/runs?host=beast&limit=20&format=csv")
    assert headers["content-type"].startswith("text/csv")
    table = list(csv.DictReader(io.StringIO(text.decode())))
    assert [int(row["id"]) for row in table] == [row["id"] for row in rows]
    assert [row["scenario"] for row in table] == [row["scenario"] for row in rows]
    assert float(table[0]["ttft_s"]) == rows[0]["ttft_s"]


def test_export_of_runs_contains_every_run_once(site):
    count = json.loads(get(f"{site}/api/health")[1])["run_count"]
    ids = [json.loads(line)["id"] for line in get(f"{site}/api/v1/export/runs")[1].splitlines()]
    assert len(ids) == len(set(ids)) == count
    lines = get(f"{site}/api/v1/export/runs?format=csv&host=beast")[1].decode().splitlines()
    assert len(lines) == 1 + sum(1 for row in csv.DictReader(lines) if row["target"] == "beast")


@pytest.mark.parametrize(
    "path, status, message",
    [
        ("runs?limt=3", 400, "did you mean 'limit'"),
        ("runs?limit=5001", 400, "'limit' must be an integer from 1 to 5000"),
        ("runs?limit=-1", 400, "'limit'"),
        ("runs?ok=maybe", 400, "'ok' must be true or false"),
        ("series?model=x", 400, "the parameter 'scenario' is required"),
        ("series?model=x&scenario=y", 404, "no scenario is called 'y'"),
        ("series?model=x&scenario=y&metric=z", 400, "'metric' must be one of"),
        ("compare?a=nosuch&b=@beast", 404, "no build is called 'nosuch'"),
        ("compare?a=@nowhere&b=@beast", 404, "nothing was measured of '@nowhere'"),
        ("run?id=999999999", 404, "there is no run 999999999"),
        (f"runs?model={'x' * 400}", 400, "at most 300, and no NUL"),
        ("nothing", 404, "Not Found"),
    ],
)
def test_invalid_request_gets_a_one_line_error(site, path, status, message):
    code, text = error_response(f"{site}/api/v1/{path}")
    assert code == status
    assert message in text
    assert text.count("\n") == 1


def test_server_opens_a_database_that_is_created_after_its_start(tmp_path, serving):
    path = tmp_path / "later.sqlite"
    with serving(path) as url:
        message = f"nothing has been measured yet: {path} does not exist; run `helexa-bench once`\n"
        for route in ("api/health", "api/v1/export/runs", "api/v1/export/runs?format=csv"):
            assert error_response(f"{url}/{route}") == (503, message)
        Store(path).close()
        assert json.loads(get(f"{url}/api/health")[1]) == {"status": "ok", "run_count": 0}
        assert b"Nothing has been measured yet" in get(f"{url}/")[1]


def test_responses_include_data_written_after_the_server_started(past, tmp_path, serving):
    path = tmp_path / "copy.sqlite"
    path.write_bytes(past.read_bytes())
    with serving(path) as url:
        assert all(row["scorer"] == "checks" for row in json.loads(get(f"{url}/api/capability?limit=5")[1]))
        newest = json.loads(get(f"{url}/api/capability?limit=1")[1])[0]
        with Store(path) as store:
            store.score(newest["run_id"], 0.25, "ada")
        row = json.loads(get(f"{url}/api/capability?limit=1")[1])[0]
        assert (row["score"], row["scorer"]) == (0.25, "ada")


def test_csv_escapes_spreadsheet_formulas():
    from helexa.bench.api import to_csv
    from helexa.bench.results.summary_and_dimensions import Swap

    row = Swap("=1+1", "-x", "swap", "b", "", None, -3.0, None, None, None, None, 1)
    line = to_csv([row]).decode().splitlines()[1]
    assert line == "'=1+1,'-x,swap,b,,,-3.0,,,,,1"
