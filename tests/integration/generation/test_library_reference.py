"""docs/library-reference.md is the output of its script."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / ".ci" / "library_reference.py"


def test_generated_library_reference_page_is_up_to_date():
    """If this test fails, run `.venv/bin/python .ci/library_reference.py`."""
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text(encoding="utf-8") == script["reference"]()
