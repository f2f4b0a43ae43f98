"""The Triton kernels compile for GPUs, and keep all values in registers."""

import pytest
from other_processes import other_process


pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("width", [512, *(pytest.param(width, marks=pytest.mark.slow) for width in (128, 256, 1024))])
def test_no_value_is_spilled(repository, width):
    script = repository / "scripts/benchmarks/compile_kernels.py"
    result = other_process([str(script), "--widths", str(width)], TRITON_INTERPRET="0")
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in result.stdout.splitlines()[2:]]
    assert len(rows) == 20 and all(int(row[4]) == 0 for row in rows), result.stdout
