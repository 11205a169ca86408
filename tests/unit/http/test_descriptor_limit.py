"""The limit on open files, raised in a separate process."""

import subprocess
import sys

import pytest

RAISE = """
import resource
from helexa.http.process import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("soft", [100, 1000])
def test_soft_limit_of_file_descriptors_is_raised_to_the_hard_limit(soft: int) -> None:
    code = RAISE.format(soft=soft, hard=1000)
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["1000", "1000", "1000"]
