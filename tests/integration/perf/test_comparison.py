"""Tables and verdicts that a comparison computes from known figures."""

import argparse
import json
import subprocess

import pytest


def line(engine, row, tok_s, **more):
    return {"engine": engine, "row": row, "tok_s": tok_s, **more}


def compared(*lines):
    from support.comparison import Comparison

    return Comparison(lines)


def test_speed_comparison_table_has_medians_ratios_and_share_of_the_maximum_speed():
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


def test_speed_comparison_marks_widely_scattered_values():
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


def test_ratio_to_the_best_other_engine_uses_only_engines_with_a_result_for_the_row():
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


def test_comparison_table_of_helexa_alone_has_no_columns_for_other_engines():
    assert compared(line("helexa", "decode@1", 90.0)).table().splitlines() == [
        "| Row | helexa | of the ceiling |",
        "| --- | --- | --- |",
        "| `decode@1` | 90.0 |  |",
    ]


def test_benchmark_row_names_are_parsed_into_kind_batch_and_context():
    from support.rows import parse_rows

    rows = parse_rows("decode@4,decode@1:7700,sampled@16,prefill@512")
    assert [(row.name, row.sequences, row.context, row.sampled) for row in rows] == [
        ("decode@4", 4, 64, False),
        ("decode@1:7700", 1, 7700, False),
        ("sampled@16", 16, 64, True),
        ("prefill@512", 0, 512, False),
    ]


def test_long_prefill_row_is_measured_with_the_decode_row_of_the_same_context():
    from support.rows import parse_rows

    rows = parse_rows("prefill@512,prefill@7700,prefill@9000,decode@1:512,decode@1:7700,decode@2:9000,sampled@1:9000")
    assert [(row.name, row.prefill_row) for row in rows] == [
        ("prefill@512", ""),
        ("prefill@9000", ""),
        ("decode@1:512", ""),
        ("decode@1:7700", "prefill@7700"),
        ("decode@2:9000", ""),
        ("sampled@1:9000", ""),
    ]


def test_measure_rows_reports_the_tokens_per_second_of_every_row(capsys):
    from support.rows import measure_rows, parse_rows

    prefills = iter([5.0, 2.0, 0.25, 10.0])  # seconds: decode@2, twice prefill@512, decode@1:2000

    def measure(row):
        if row.sampled:
            raise RuntimeError("no sampler")
        return next(prefills), row.sequences * 4.0

    measure_rows("peer", parse_rows("decode@2,sampled@2,prefill@512,decode@1:2000,prefill@2000"), measure)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["row"], line["tok_s"]) for line in lines] == [
        ("decode@2", 16.0),  # 2 sequences, 64 steps, 8 s
        ("prefill@512", 2048.0),  # the faster of two runs
        ("decode@1:2000", 16.0),
        ("prefill@2000", 200.0),
    ]


def test_best_other_engine_column_ignores_other_configurations_of_helexa():
    comparison = compared(
        line("helexa", "decode@1", 300.0),
        line("helexa int8", "decode@1", 400.0),
        line("openvino", "decode@1", 100.0),
        line("llama.cpp", "decode@1", 200.0),
    )
    assert comparison.table().splitlines() == [
        "| Row | helexa | helexa int8 | llama.cpp | openvino | / helexa int8 | / llama.cpp | / openvino | / best peer "
        "| of the ceiling |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `decode@1` | 300.0 | 400.0 | 200.0 | 100.0 | 0.75 | 1.50 | 3.00 | 1.50 |  |",
    ]


def test_comparison_table_shows_sampled_decoding_as_a_share_of_greedy_decoding():
    comparison = compared(
        line("helexa", "decode@1", 90.0),
        line("helexa", "sampled@1", 80.0, share_of_greedy=0.97),
        line("helexa", "sampled@1", 85.0, share_of_greedy=0.958),
        line("helexa", "sampled@1", 82.0, share_of_greedy=0.961),
    )
    assert comparison.table().splitlines() == [
        "| Row | helexa | of the ceiling | of greedy |",
        "| --- | --- | --- | --- |",
        "| `decode@1` | 90.0 |  |  |",
        "| `sampled@1` | 82.0 |  | 96.1% |",
    ]
    assert comparison.snapshot()["sampled@1"]["share_of_greedy"]["min"] == 0.958


@pytest.mark.parametrize("name", ["decode", "decode@0", "decode@1:", "prefill@512:64", "prefill@-1", "encode@4", ""])
def test_invalid_benchmark_row_name_is_rejected(name):
    from support.rows import parse_rows

    with pytest.raises(argparse.ArgumentTypeError, match="is no row"):
        parse_rows(f"decode@1,{name}")


def test_benchmark_prompts_have_distinct_prefixes():
    from support.rows import prompt

    prompts = [prompt(64) for _ in range(100)]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 100


@pytest.mark.parametrize(("register", "found"), [("%zmm1, %zmm2, %zmm3", True), ("%ymm1, %ymm2, %ymm3", False)])
def test_vnni_is_detected_in_a_library_only_with_512_bit_registers(tmp_path, register, found):
    from support.peers import _has_vnni

    source, library = tmp_path / "product.s", tmp_path / "library.so"
    source.write_text(f".globl product\nproduct:\n vpdpbusd {register}\n ret\n")
    try:
        subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, source], check=True, capture_output=True)
        subprocess.run(["objdump", "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs gcc for x86 and objdump")
    assert _has_vnni(library) is found
