"""What a comparison says of figures that we know."""

import argparse

import pytest


def line(engine, row, tok_s, **more):
    return {"engine": engine, "row": row, "tok_s": tok_s, **more}


def compared(*lines):
    from comparison import Comparison

    return Comparison(lines)


def test_the_table_has_medians_ratios_and_the_share_of_each_turns_own_ceiling():
    found = compared(
        line("llama.cpp", "decode@1", 100.0),
        line("helexa", "decode@1", 150.0, ceiling_tok_s=200.0),  # 75 %
        line("helexa", "decode@1", 156.0, ceiling_tok_s=390.0),  # 40 %
        line("helexa", "decode@1", 152.0, ceiling_tok_s=304.0),  # 50 %
        line("openvino", "decode@1", 80.0),
    )
    assert found.table().splitlines() == [
        "| Row | helexa | llama.cpp | openvino | / llama.cpp | / openvino | / best peer | of the ceiling |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `decode@1` | 152.0 | 100.0 | 80.0 | 1.52 | 1.90 | 1.52 | 50% |",
    ]


def test_figures_too_far_apart_are_marked():
    steady = [line("helexa", "prefill@512", rate) for rate in (100.0, 107.0, 115.0)]
    wild = [line("llama.cpp", "prefill@512", rate) for rate in (84.0, 100.0, 100.0)]
    found = compared(*steady, *wild)
    assert found.table().splitlines()[-1] == "| `prefill@512` | 107.0 | 100.0 * | 1.07 |  |"
    figures = found.snapshot()["prefill@512"]["tok_s"]
    assert not figures["helexa"]["wide"]
    assert figures["llama.cpp"] == {
        "median": 100.0,
        "min": 84.0,
        "max": 100.0,
        "wide": True,
        "values": [84.0, 100, 100],
    }


def test_a_row_that_a_peer_cannot_do_is_empty_and_the_best_of_the_others_counts():
    found = compared(
        line("helexa", "decode@4", 300.0),
        line("llama.cpp", "decode@4", 200.0),
        line("openvino", "decode@4", 250.0),
        line("helexa", "decode@1:7700", 90.0),
        line("llama.cpp", "decode@1:7700", 36.0),
    )
    assert found.table().splitlines()[2:] == [
        "| `decode@4` | 300.0 | 200.0 | 250.0 | 1.50 | 1.20 | 1.20 |  |",
        "| `decode@1:7700` | 90.0 | 36.0 |  | 2.50 |  | 2.50 |  |",
    ]
    assert found.snapshot()["decode@1:7700"]["ratios"] == {"llama.cpp": 2.5}


def test_our_engine_alone_needs_no_peer():
    assert compared(line("helexa", "decode@1", 90.0)).table().splitlines() == [
        "| Row | helexa | of the ceiling |",
        "| --- | --- | --- |",
        "| `decode@1` | 90.0 |  |",
    ]


def test_rows_are_read_as_they_are_written():
    from rows import parse_rows

    found = [(row.name, row.sequences, row.context) for row in parse_rows("decode@4,decode@1:7700,prefill@512")]
    assert found == [("decode@4", 4, 64), ("decode@1:7700", 1, 7700), ("prefill@512", 0, 512)]


@pytest.mark.parametrize("name", ["decode", "decode@0", "decode@1:", "prefill@512:64", "prefill@-1", "encode@4", ""])
def test_what_is_no_row_is_refused(name):
    from rows import parse_rows

    with pytest.raises(argparse.ArgumentTypeError, match="is no row"):
        parse_rows(f"decode@1,{name}")


def test_no_two_prompts_begin_alike():
    from rows import prompt

    prompts = [prompt(64) for _ in range(100)]
    assert len({tuple(one[:8]) for one in prompts}) == 100
