"""Tables and verdicts that a comparison computes from known figures."""

import argparse

import pytest


def line(engine, row, tok_s, **more):
    return {"engine": engine, "row": row, "tok_s": tok_s, **more}


def compared(*lines):
    from support.comparison import Comparison

    return Comparison(lines)


def test_table_has_medians_ratios_and_share_of_ceiling():
    comparison = compared(
        line("llama.cpp", "decode@1", 100.0),
        line("helexa", "decode@1", 150.0, ceiling_tok_s=200.0),  # 75 %
        line("helexa", "decode@1", 156.0, ceiling_tok_s=390.0),  # 40 %
        line("helexa", "decode@1", 152.0, ceiling_tok_s=304.0),  # 50 %
        line("openvino", "decode@1", 80.0),
    )
    assert comparison.table().splitlines() == [
        "| Row | helexa | llama.cpp | openvino | / llama.cpp | / openvino | / best peer | of the ceiling |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `decode@1` | 152.0 | 100.0 | 80.0 | 1.52 | 1.90 | 1.52 | 50% |",
    ]


def test_widely_scattered_figures_are_marked():
    steady = [line("helexa", "prefill@512", rate) for rate in (100.0, 107.0, 115.0)]
    wild = [line("llama.cpp", "prefill@512", rate) for rate in (84.0, 100.0, 100.0)]
    comparison = compared(*steady, *wild)
    assert comparison.table().splitlines()[-1] == "| `prefill@512` | 107.0 | 100.0 * | 1.07 |  |"
    figures = comparison.snapshot()["prefill@512"]["tok_s"]
    assert not figures["helexa"]["wide"]
    assert figures["llama.cpp"] == {
        "median": 100.0,
        "min": 84.0,
        "max": 100.0,
        "wide": True,
        "values": [84.0, 100, 100],
    }


def test_row_without_a_peer_figure_uses_the_best_other_peer():
    comparison = compared(
        line("helexa", "decode@4", 300.0),
        line("llama.cpp", "decode@4", 200.0),
        line("openvino", "decode@4", 250.0),
        line("helexa", "decode@1:7700", 90.0),
        line("llama.cpp", "decode@1:7700", 36.0),
    )
    assert comparison.table().splitlines()[2:] == [
        "| `decode@4` | 300.0 | 200.0 | 250.0 | 1.50 | 1.20 | 1.20 |  |",
        "| `decode@1:7700` | 90.0 | 36.0 |  | 2.50 |  | 2.50 |  |",
    ]
    assert comparison.snapshot()["decode@1:7700"]["ratios"] == {"llama.cpp": 2.5}


def test_helexa_alone_needs_no_peer():
    assert compared(line("helexa", "decode@1", 90.0)).table().splitlines() == [
        "| Row | helexa | of the ceiling |",
        "| --- | --- | --- |",
        "| `decode@1` | 90.0 |  |",
    ]


def test_row_names_are_parsed():
    from support.rows import parse_rows

    rows = [(row.name, row.sequences, row.context) for row in parse_rows("decode@4,decode@1:7700,prefill@512")]
    assert rows == [("decode@4", 4, 64), ("decode@1:7700", 1, 7700), ("prefill@512", 0, 512)]


@pytest.mark.parametrize("name", ["decode", "decode@0", "decode@1:", "prefill@512:64", "prefill@-1", "encode@4", ""])
def test_invalid_row_name_is_rejected(name):
    from support.rows import parse_rows

    with pytest.raises(argparse.ArgumentTypeError, match="is no row"):
        parse_rows(f"decode@1,{name}")


def test_prompts_have_distinct_prefixes():
    from support.rows import prompt

    prompts = [prompt(64) for _ in range(100)]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 100
