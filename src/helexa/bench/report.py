"""Formats results as Markdown tables, for terminals and pull request comments."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from helexa.bench.metric_definitions import METRICS
from helexa.bench.pages.formatting import change, measured, memory, number, seconds, share
from helexa.bench.results import capacity_and_scaling, runs_and_scores
from helexa.bench.results.archive import Archive
from helexa.bench.results.comparison import MetricComparison
from helexa.bench.results.summary_and_dimensions import SummaryRow, Swap, summary, swaps
from helexa.bench.verdicts_and_change_points import MIN_SAMPLES

FINDERS: dict[str, Callable[[Archive], list[Any]]] = {
    "summary": summary,
    "scaling": capacity_and_scaling.scaling,
    "swap": swaps,
    "capability": runs_and_scores.artifacts,
    "concurrency": capacity_and_scaling.capacity,
}


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 2) -> str:
    """Return an aligned Markdown table.

    Args:
        columns: column headings.
        rows: texts of each row.
        left: number of left-aligned columns. The remaining columns are right-aligned.
    """
    lines = [list(columns), *([_plain(cell) for cell in row] for row in rows)]
    widths = [max(3, *(len(line[place]) for line in lines)) for place in range(len(columns))]

    def written(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    rule = [("-" * width if place < left else "-" * (width - 1) + ":") for place, width in enumerate(widths)]
    return "\n".join([written(lines[0]), f"| {' | '.join(rule)} |", *map(written, lines[1:])])


def comparison(compared: Sequence[MetricComparison]) -> str:
    """Return a comparison as a Markdown table, with notes below."""
    rows = [
        (
            f"{row.model} {row.scenario}" + (f" on {row.target}" if row.target else ""),
            METRICS[row.metric].title,
            measured(row.a, row.metric),
            measured(row.b, row.metric),
            change(row.ratio.ratio) if row.ratio else "–",
            f"{change(row.ratio.low)} … {change(row.ratio.high)}" if row.ratio else "–",
            row.state,
            f"{row.samples_a}/{row.samples_b}",
        )
        for row in compared
    ]
    has_too_few = any(row.state == "too few" for row in compared)
    note = f"\n\ntoo few: a verdict needs {MIN_SAMPLES} samples of each side, above 0" if has_too_few else ""
    differs = "; ".join(dict.fromkeys(text for row in compared for text in row.differs))
    note += f"\n\nA and B differ in more than the build: {differs}" if differs else ""
    return table(("configuration", "metric", "A", "B", "change", "95 %", "verdict", "n"), rows) + note


def _summary(results: Sequence[SummaryRow]) -> str:
    columns = ("engine", "model", "scenario", "prompt tok", "prefill tok/s", "TTFT", "TTFT p95", "decode tok/s")
    more = ("total", "total p95", "VRAM", "conc", "queue ms", "rej", "build", "n")
    rows = [
        (
            one.target_name,
            one.model_id + (" *" if one.estimated else ""),
            one.scenario_id,
            number(one.prompt_tokens),
            number(one.prefill_tps_median),
            seconds(one.ttft_s_median),
            seconds(one.ttft_s_p95),
            number(one.decode_tps_median),
            seconds(one.total_s_median),
            seconds(one.total_s_p95),
            memory(one.vram_used_mb_median),
            number(one.concurrency),
            number(one.queue_wait_ms_median),
            number(one.rejected_median),
            one.git_sha,
            str(one.samples),
        )
        for one in results
    ]
    note = "\n\n\\* estimated: tokens were counted by chunks" if any(one.estimated for one in results) else ""
    return table((*columns, *more), rows, left=3) + note


def _scaling(results: Sequence[capacity_and_scaling.Scaling]) -> str:
    rows = [
        (
            f"{one.target} {one.model}",
            one.kind,
            number(point.prompt_tokens),
            number(point.prefill_tps),
            seconds(point.ttft_s),
            number(point.decode_tps),
            one.build,
            str(point.samples),
        )
        for one in results
        for point in one.points
    ]
    return table(("model", "ladder", "context tok", "prefill tok/s", "TTFT", "decode tok/s", "build", "n"), rows)


def _swaps(results: Sequence[Swap]) -> str:
    rows = [
        (
            f"{one.target} {one.model}",
            one.quant,
            number(one.unload_ms_median),
            number(one.load_ms_median),
            seconds(one.cold_ttft_s_median),
            seconds(one.cold_total_s_median),
            one.build,
            str(one.samples),
        )
        for one in results
    ]
    return table(("model", "quant", "unload ms", "load ms", "cold TTFT", "cold total", "build", "n"), rows)


def _capability(results: Sequence[runs_and_scores.Artifact]) -> str:
    rows = [
        (
            f"{one.target} {one.model}",
            one.scenario,
            str(one.run_id),
            share(one.score),
            one.scorer,
            number(one.decode_tps),
            seconds(one.total_s),
            one.build,
        )
        for one in results
    ]
    return table(("model", "probe", "run", "score", "scorer", "decode tok/s", "total", "build"), rows)


def _concurrency(results: Sequence[capacity_and_scaling.Capacity]) -> str:
    rows = [
        (
            f"{one.target} {one.model}",
            f"{one.loop} loop" + (", knee" if point.load == one.knee else ""),
            number(point.load),
            number(point.decode_tps),
            number(point.output_tps),
            seconds(point.ttft_p95_s),
            number(point.queue_wait_ms),
            share(point.reject_rate),
            number(point.goodput_rps),
            one.build,
            str(point.samples),
        )
        for one in results
        for point in one.points
    ]
    columns = ("model", "load", "level", "each tok/s", "all tok/s", "TTFT p95", "queue ms", "refused", "goodput/s")
    return table((*columns, "build", "n"), rows)


def _plain(text: str) -> str:
    """Return `text` on one line, with `|` escaped for a Markdown table.

    An empty text becomes a dash.
    """
    return " ".join(text.replace("|", "\\|").split()) or "–"


WRITERS: dict[str, Callable[[Any], str]] = {
    "summary": _summary,
    "scaling": _scaling,
    "swap": _swaps,
    "capability": _capability,
    "concurrency": _concurrency,
}
