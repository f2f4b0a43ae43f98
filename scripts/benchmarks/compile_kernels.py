#!/usr/bin/env python
"""
Compile each Triton kernel for GPUs of two generations, of which none is needed, and print registers, spilled bytes and
shared memory of a program.

    python scripts/benchmarks/compile_kernels.py --widths 128 512 1024
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from measuring import run_script
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recnmt_hf.commands.arguments import Parser, whole
from recnmt_hf.models import kernels_triton_attentional_steps as attentional
from recnmt_hf.models import kernels_triton_gru as gru
from recnmt_hf.models import kernels_triton_light_decoders as light
from recnmt_hf.models import kernels_triton_onlstm_transformer as onlstm
from recnmt_hf.models import kernels_triton_vrnmt as vrnmt
from recnmt_hf.models.kernels_triton import block, row_constants


# Arguments that are integers, or tensors in bfloat16 or of truth values; the others are tensors in float32.
INTEGERS = {"first", "words", "rows", "length", "group"}
LOW = {"recurrent", "mapped", "query", "grad_query", "grad_recurrent", "from_next"}
TRUTH = {"real", "visible"}


def kernels(width: int) -> dict[Any, dict[str, Any]]:
    """Return all kernels, each with its constants for a width, and for 32 source words where it reads them."""
    row = {"D": width, **row_constants(width)}
    steps = {"SIZE": width, "N": width, "CHUNK": 1, "IS_FIRST": False, "BLOCK_N": block(width), "BLOCK_C": 1}
    steps["num_warps"] = row["num_warps"]
    attention = {"D": width, "V": 3 * width, "PARTS": 2, "BLOCK_N": 32, "num_warps": 4}
    attention |= dict.fromkeys(("BLOCK_D", "BLOCK_V"), attentional.TILE // 32)
    return {
        onlstm.step_forward: steps,
        onlstm.step_backward: {**steps, "IS_LAST": False},
        gru.gru_forward: row,
        gru.gru_backward: row,
        attentional.attention_forward: attention,
        attentional.attention_backward: attention,
        light.scan: {"D": width, "BLOCK": light.CHANNELS, "num_warps": 1},
        vrnmt.draw_forward: row,
        vrnmt.draw_backward: row,
    }


def kind_of(name: str, constants: dict[str, Any]) -> str:
    """Return the type of a kernel's argument for its compiler."""
    if name in constants:
        return "constexpr"
    if name in INTEGERS or name.endswith("_stride"):
        return "i32"
    return "*i1" if name in TRUTH else "*bf16" if name in LOW or name.startswith("low_") else "*fp32"


def compile_kernel(kernel: Any, settings: dict[str, Any], capability: int) -> tuple[int, int, int]:
    """Return the registers of a thread, its spilled bytes, and the bytes of shared memory of a program."""
    constants = {name: value for name, value in settings.items() if name != "num_warps"}
    signature = {name: kind_of(name, constants) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": settings["num_warps"]})
    architecture = compiled.asm["ptx"].partition("\n.target ")[2].split()[0]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        # Triton brings several assemblers, of which older ones reject newer versions of PTX.
        for assembler in sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*"), reverse=True):
            command = [assembler, "-v", f"-arch={architecture}", file.name, "-o", "/dev/null"]
            report = subprocess.run(command, capture_output=True, text=True)
            if report.returncode == 0:
                break
    numbers = [re.search(pattern, report.stderr) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
    registers, spills = (int(number[1]) if number else -1 for number in numbers)
    return registers, spills, compiled.metadata.shared


def main() -> None:
    parser = Parser(prog=Path(sys.argv[0]).name, description=__doc__)
    parser.add_argument("--widths", type=whole(1), nargs="+", default=[128, 512, 1024], help="widths of states")
    parser.add_argument("--capabilities", type=whole(1), nargs="+", default=[80, 90], help="generations of GPUs")
    args = parser.parse_args()
    print("| kernel | width | GPU | registers | spilled bytes | shared bytes |")
    print("|---|---|---|---|---|---|")
    for width in args.widths:
        for kernel, settings in kernels(width).items():
            for capability in args.capabilities:
                numbers = compile_kernel(kernel, settings, capability)
                print(
                    "|",
                    " | ".join(map(str, [kernel.fn.__name__, width, f"sm_{capability}", *numbers])),
                    "|",
                    flush=True,
                )


if __name__ == "__main__":
    sys.exit(run_script(main))
