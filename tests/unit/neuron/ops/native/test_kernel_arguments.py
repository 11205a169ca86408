"""What Python and C share: constants, structs and the arguments of kernels."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from helexa.neuron.ops import kernel_header
from helexa.neuron.ops.kernel_header import CONSTANTS, STRUCTS, Field
from helexa.neuron.ops.native import compilation
from helexa.neuron.ops.native.attention import Split, Tile
from helexa.neuron.ops.native.kernel_library import Argument, Instruction, KernelLibrary, structure
from helexa.neuron.ops.native.native_ops import NativeOps

_NEURON = compilation.KERNELS.parents[1]


def test_structs_and_constants_of_kernels_match_between_c_and_python(tmp_path: Path) -> None:
    """Compile a C program that prints the size of each struct, offset and size of each field, and each constant."""
    cc = shutil.which("gcc") or shutil.which("clang")
    if cc is None:
        pytest.skip("no C compiler on this machine")
    types = {name: structure(name) for name in STRUCTS} | {"instruction": Instruction}
    lines, expected = [], []
    for name, value in CONSTANTS.items():
        lines.append(f'printf("{name} %d\\n", {name});')
        expected.append(f"{name} {value}")
    for name, python in types.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(python)}")
        for field, *_ in python._fields_:
            lines.append(f'printf("{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
            place = getattr(python, field)
            expected.append(f"{field} {place.offset} {place.size}")
    includes = ["graph.h", *(path.name for path in compilation.sources() if path.suffix == ".h")]
    program = ["#include <stddef.h>", "#include <stdio.h>", *(f'#include "{name}"' for name in includes)]
    (tmp_path / "layout.c").write_text("\n".join([*program, "int main(void) {", *lines, "}"]))
    build = [cc, "-Werror", "-Wno-psabi", "-std=gnu11", f"-I{compilation.KERNELS}", "layout.c", "-o", "layout", "-lm"]
    subprocess.run(build, cwd=tmp_path, check=True)
    printed = subprocess.run(tmp_path / "layout", capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == expected
    assert len(expected) > 200


def test_kernel_constants_are_defined_only_in_kernels_h() -> None:
    """No other source defines a constant of kernels.h, and Python has no literal copy of it."""
    names = "|".join(CONSTANTS)
    defined = re.compile(rf"^\s*#\s*define\s+({names})\b|^\s*_?({names})\s*=\s*\d", re.MULTILINE)
    sources = [path for path in compilation.sources() if path.name != "kernels.h"]
    sources += (path for package in ("engine", "ops") for path in (_NEURON / package).glob("*.py"))
    definitions = {path.name: match[0] for path in sources if (match := defined.search(path.read_text()))}
    assert definitions == {}


def test_fields_of_the_attention_plan_in_python_match_the_structs_of_the_c_header() -> None:
    for table, name in ((Tile, "tile"), (Split, "split")):
        assert [Field(field, "int64_t", False, False) for field in table._fields] == STRUCTS[name]


@pytest.mark.parametrize(
    "line",
    [
        "#define LANES (8 * 2)",
        "extern int64_t lanes;",
        "enum { ONE };",
        "typedef struct {\n    int64_t count[2];\n} pair;",
        "typedef struct {\n    int64_t **rows;\n} pair;",
        "typedef struct {\n    struct other *rows;\n} pair;",
    ],
)
def test_unparsable_header_declarations_are_rejected(line: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        kernel_header._parse(f"#define A 1\n{line}\n#define B 2\n")


def test_missing_unknown_or_mistyped_kernel_arguments_are_rejected(library: KernelLibrary) -> None:
    x, delta, weight, out = torch.ones(3, 32), torch.ones(3, 32), torch.ones(32), torch.zeros(3, 32)
    good: dict[str, Argument] = {"x": x, "delta": delta, "weight": weight, "out": out, "rows": 3, "width": 32, "eps": 0}
    wrong: list[tuple[str, dict[str, Argument]]] = [
        ("missing or unknown: eps", {name: value for name, value in good.items() if name != "eps"}),
        ("missing or unknown: bias", good | {"bias": None}),
        ("x is a tensor of torch.float64", good | {"x": x.double()}),
        ("x is None", good | {"x": None}),
        ("x is 4096", good | {"x": 4096}),
        ("rows is a tensor", good | {"rows": torch.tensor(3)}),
        ("int", good | {"rows": 3.0}),
        ("int", good | {"rows": None}),
        ("eps|float|real", good | {"eps": None}),
    ]
    for message, arguments in wrong:
        with pytest.raises(TypeError, match=f"add_rms_norm: .*{message}"):
            library.call("add_rms_norm", **arguments)
    assert not out.any()
    library.call("add_rms_norm", **good)
    assert torch.allclose(out, torch.ones(()))
    library.call("add_rms_norm", **good | {"delta": None})
    assert torch.equal(x, torch.full((3, 32), 2.0)), "the second call adds nothing"


def test_kernel_argument_with_a_wrong_index_dtype_is_rejected(native: NativeOps) -> None:
    with pytest.raises(TypeError, match=r"choose_rows: chosen is a tensor of torch\.int64"):
        native.choose_rows(torch.ones(4, 16), torch.tensor([0, 3]))
