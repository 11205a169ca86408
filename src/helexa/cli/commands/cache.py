"""`helexa cache`: saved prompts and packed weights on this machine's disk."""

import json
import time
from collections.abc import Iterable
from typing import Annotated
from urllib.parse import quote

from cyclopts import Parameter

from helexa.cli.commands.list_show_and_pull import ago
from helexa.cli.flags_and_completion import AsJson, ModelName
from helexa.cli.terminal_output_and_errors import MODEL_NOT_FOUND, CommandError, note, printable
from helexa.cli.up_state_keys_and_logs import running_ups
from helexa.core.display import file_size_text, text_table
from helexa.core.model_source_ids import bare_id, typed_source
from helexa.neuron.cache_folder import SavedFiles, delete_saved, packed_weights, saved_prompts

_HEADINGS = ("MODEL", "KIND", "SIZE", "LAST USED")
_CLEAR_SECONDS = 70.0  # timeout of the request; longer than the minute for which the node waits for its engine


def cache(*models: ModelName, clear: Annotated[bool, Parameter(negative="")] = False, as_json: AsJson = False) -> None:
    """List what engines have saved of earlier prompts and loads, or delete it.

    An engine reads saved prompts in place of computing the beginning of a prompt again, and packed weights in place of
    converting the weights of a model again. A model has several entries if it ran with different settings or versions.
    With --clear, the models of a running `helexa up` also forget the prompts in memory.

    Args:
        models: Only these models. Default: all models.
        clear: Delete the saved files.
        as_json: Print JSON for programs.
    """
    names = {bare_id(typed_source(model)) for model in models} | set(models)
    saved = sorted([*saved_prompts(), *packed_weights()], key=lambda entry: entry.used)
    entries = [entry for entry in saved if not names or names.intersection(entry.models)]
    if clear:
        _clear(entries, names)
    elif as_json:
        facts = [
            {
                "kind": entry.kind,
                "model": entry.models[0],
                "models": entry.models,
                "size_bytes": entry.size,
                "last_used": int(entry.used),
            }
            for entry in entries
        ]
        print(json.dumps(facts[::-1], indent=2))
    elif entries:
        rows = [
            (printable(", ".join(entry.models)), entry.kind, file_size_text(entry.size), ago(time.time() - entry.used))
            for entry in reversed(entries)
        ]
        print(text_table(_HEADINGS, rows, right=("SIZE",)))
    else:
        note(
            "nothing is saved on this machine" if not models else f"nothing is saved for {printable(', '.join(models))}"
        )


def _clear(entries: list[SavedFiles], names: Iterable[str]) -> None:
    for up in running_ups():
        gateway = up.gateway()
        for model in names or {info.id for node in gateway.node_reports() for info in node.models}:
            try:
                gateway.delete(f"/api/models/{quote(model, safe='')}/prefix-cache", _CLEAR_SECONDS)
            except CommandError as error:
                if error.exit_code != MODEL_NOT_FOUND:
                    raise
    try:
        deleted = delete_saved(entries)
    except OSError as error:
        raise CommandError(f"saved prompts cannot be deleted: {error}; make the folder of this file writable") from None
    note(f"deleted {file_size_text(deleted)} of saved files")
