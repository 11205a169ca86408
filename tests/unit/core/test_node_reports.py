import json

import pytest
from pydantic import ValidationError

from helexa.core.node_reports import Cost, Discovery, Health, Limit, ModelInfo, ModelSpec, Record, Servable


@pytest.mark.parametrize(
    ("record", "minimal"),
    [
        (Discovery, {"hostname": "a", "os": "Linux"}),
        (Health, {}),
        (ModelInfo, {"id": "Org/M"}),
        (ModelSpec, {"model_id": "Org/M"}),
        (Limit, {"context": 1}),
        (Cost, {"input": 0.0, "output": 0.0}),
        (Servable, {"ok": True}),
    ],
)
def test_unknown_fields_of_a_node_report_are_ignored(record: type[Record], minimal: dict[str, object]) -> None:
    newer = record.model_validate({**minimal, "from_the_future": {"deep": [1]}})
    assert newer == record.model_validate(minimal)
    assert "from_the_future" not in newer.json_dict()


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (ModelInfo, f'{{"id": "Org/M", "limit": {{"context": {10**30}}}}}'),
        (ModelInfo, f'{{"id": "Org/M", "vram_used_mb": {2**63}}}'),
        (Health, '{"models": [{"id": "Org/M", "tok_s_decode": NaN}]}'),
    ],
)
def test_number_too_large_for_json_in_a_node_report_is_rejected(record: type[Record], text: str) -> None:
    with pytest.raises(ValidationError):
        record.model_validate_json(text)


@pytest.mark.parametrize("model_id", ["", "a\nb", "a\x1b[2Jb", "a\u202eb", "a" * 1001])
def test_empty_overlong_or_unprintable_model_id_is_rejected(model_id: str) -> None:
    with pytest.raises(ValidationError):
        ModelInfo(id=model_id)
    with pytest.raises(ValidationError):
        ModelSpec(model_id=model_id)


def test_unknown_fields_of_nested_objects_in_a_node_report_are_ignored() -> None:
    health = Health.model_validate(
        {"activation": {"state": "pre_warming", "mood": 1}, "models": [{"id": "a", "anon_in_flight": 2}]}
    )
    assert health.activation.state == "pre_warming"
    assert (health.models[0].id, health.models[0].in_flight) == ("a", 0)


def test_default_lists_of_two_health_reports_are_separate_objects() -> None:
    first, second = Health(), Health()
    first.activation.pending.append("a")
    assert second.activation.pending == []


def test_json_of_a_node_report_omits_none_values_and_keeps_zeros() -> None:
    info = ModelInfo(id="Org/M", limit=Limit(context=8192))
    assert info.json_dict() == {
        "id": "Org/M",
        "harness": "torch",
        "status": "loaded",
        "devices": [],
        "capabilities": [],
        "limit": {"context": 8192},
        "tool_call": False,
        "reasoning": False,
    }
    assert Cost(input=0.0, output=0.0).json_dict() == {"input": 0.0, "output": 0.0}


def test_node_report_is_equal_after_writing_and_reading_json() -> None:
    info = ModelInfo(id="Org/M", vram_used_mb=0, servable=Servable(ok=False, reason="insufficient_vram"))
    assert ModelInfo.model_validate_json(json.dumps(info.json_dict())) == info


@pytest.mark.parametrize("body", [{}, {"model_id": ""}, {"model_id": 5}, {"model_id": "a", "devices": ["x"]}])
def test_malformed_load_request_is_rejected(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ModelSpec.model_validate(body)
