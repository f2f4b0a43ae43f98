"""The Triton kernels compile for GPUs, and keep all values in registers."""

import os
import subprocess
import sys

import pytest


pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("width", [512, *(pytest.param(width, marks=pytest.mark.slow) for width in (128, 256, 1024))])
def test_no_value_is_spilled(repository, width):
    command = [sys.executable, repository / "scripts/benchmarks/compile_kernels.py", "--widths", str(width)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in result.stdout.splitlines()[2:]]
    assert len(rows) == 18 and all(int(row[4]) == 0 for row in rows), result.stdout
