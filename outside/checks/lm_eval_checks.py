"""Checks of lm-eval: a local task with /v1/completions (log-likelihoods and text) and with /v1/chat/completions."""

import json
import os
from pathlib import Path

import lm_eval
from checking import MODEL, SETTINGS, URL, check, run
from lm_eval.tasks import TaskManager

FOLDER = Path(os.environ["HOME"]) / "tasks"
QUESTIONS = [("The capital of France is", ["Paris", "Tokyo"]), ("Two and two make", ["four", "seven"])]
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(FOLDER / "data.json")}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
CHOICES = COMMON | {
    "task": "outside_choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 0,
    "target_delimiter": " ",
    "metric_list": [{"metric": "acc"}],
}
ANSWERS = COMMON | {
    "task": "outside_answers",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match"}],
}

FOLDER.mkdir()
rows = [{"question": question, "choices": choices} for question, choices in QUESTIONS]
(FOLDER / "data.json").write_text("\n".join(map(json.dumps, rows)))
for task in (CHOICES, ANSWERS):
    (FOLDER / f"{task['task']}.yaml").write_text(json.dumps(task))


def _evaluate(kind: str, path: str, task: str, **arguments: object) -> dict:
    """Run the evaluation task `task` with lm-eval and return its scores."""
    settings = {"model": MODEL, "base_url": f"{URL}{path}", "max_retries": 1, "eos_string": "<|im_end|>", **arguments}
    response = lm_eval.simple_evaluate(
        model=kind,
        model_args=settings,
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        log_samples=True,
    )
    print(json.dumps(response["results"], indent=1))
    assert len(response["samples"][task]) == len(QUESTIONS)
    return response["results"][task]


@check
def completions_log_likelihoods():
    scores = _evaluate(
        "local-completions",
        "/v1/completions",
        "outside_choices",
        tokenizer=SETTINGS.get("tokenizer", os.environ.get("OUTSIDE_TOKENIZER")),
        batch_size=2,
    )
    assert scores["acc,none"] == 1.0, "Paris is not the likelier capital of France"


@check
def completions_text():
    _evaluate("local-completions", "/v1/completions", "outside_answers", tokenizer_backend=None)


@check
def log_likelihoods_of_completions_with_the_tokenizer_of_the_gateway():
    scores = _evaluate("local-completions", "/v1/completions", "outside_choices", tokenizer_backend="remote")
    assert scores["acc,none"] == 1.0, "Paris is not the likelier capital of France"


@check
def chat_text():
    _evaluate("local-chat-completions", "/v1/chat/completions", "outside_answers", tokenizer_backend=None)


run()
