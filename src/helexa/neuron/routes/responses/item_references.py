"""Replace references in a request's input (`item_reference`) by the output items of stored responses."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from helexa.core.errors import ApiError, unsupported_parameter
from helexa.core.wire.responses.input import Item
from helexa.neuron.requests.response_store import ResponseStore, StoredResponse
from helexa.neuron.routes.projectors.response_items import response_of


def referred(store: ResponseStore, items: Sequence[Item], principal: str) -> dict[str, StoredResponse]:
    """Return the stored responses that contain the items to which `items` refer, by the id of the referenced item.

    Raises:
        ApiError: status 400. Code `unsupported_parameter`: there are references, but the node stores no responses. Code
            `item_not_found`: `principal` owns no stored response to which the item could belong.
    """
    sources: dict[str, StoredResponse] = {}
    for index, item in enumerate(items):
        if not _is_reference(item):
            continue
        field, id = f"input.{index}", str(item["id"])
        if not store.enabled:
            hint = "this node stores no responses; send the item itself"
            raise unsupported_parameter(field, f"'{field}': references to items are not supported: {hint}")
        response = store.find(response_of(id), principal)
        if response is None:
            raise _unknown(field, id)
        sources[id] = response
    return sources


def resolved(items: Sequence[Item], sources: Mapping[str, StoredResponse]) -> list[dict[str, Any]]:
    """Return `items` with each reference replaced by the item to which it refers. Slow for long responses.

    Args:
        items: input items of a request.
        sources: the stored responses that contain the referenced items, by the id of the referenced item.

    Raises:
        ApiError: status 400, code `item_not_found`: the stored response has no output item with the id.
    """
    outputs: dict[str, dict[str, Any]] = {}
    resolved_items: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if not _is_reference(item):
            resolved_items.append(dict(item))
            continue
        id = str(item["id"])
        response = response_of(id)
        if response not in outputs:
            outputs[response] = {
                output_item["id"]: output_item for output_item in from_json(sources[id].body)["output"]
            }
        if id not in outputs[response]:
            raise _unknown(f"input.{index}", id)
        resolved_items.append(outputs[response][id])
    return resolved_items


def _is_reference(item: Item) -> bool:
    return item.get("type") in (None, "item_reference") and "id" in item and "role" not in item


def _unknown(field: str, id: str) -> ApiError:
    return ApiError(400, "item_not_found", f"{field}: item {id[:256]!r} not found", param=field)
