"""`recnmt env`: print versions, hardware, fast paths and installed extras for a bug report."""

import argparse
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from .. import __version__
from .arguments import Parser


PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "datasets", "huggingface_hub", "numpy")


def add_arguments(parser: Parser) -> None:
    pass


def run(args: argparse.Namespace) -> None:
    import torch

    from ..models.kernels_shared import allowed, has_bfloat16

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    lines = {
        "recnmt_hf": __version__,
        "Python": f"{platform.python_version()}, {platform.platform()}",
        **{package: installed_version(package) for package in PACKAGES},
        "processor": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, bfloat16: {'yes' if has_bfloat16() else 'no'}",
        "GPU": ", ".join(gpus) or "none",
        "CUDA": torch.version.cuda or "none",
        "triton": installed_version("triton"),
        "fast paths": "on" if allowed() else "off (RECNMT_FAST_PATHS=0)",
        "extras": ", ".join(installed_extras()) or "none",
    }
    for name, value in lines.items():
        print(f"{name}: {value}")


def installed_version(package: str) -> str:
    """Return the version of a package, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def installed_extras() -> Iterator[str]:
    """Yield the extras of this package of which every package is installed."""
    extras: dict[str, list[str]] = {}
    for requirement in requires("recnmt-hf") or ():
        if match := re.match(r"([\w-]+).*extra == ['\"](\w+)", requirement):
            extras.setdefault(match[2], []).append(match[1])
    for extra, packages in extras.items():
        if all(installed_version(package) != "not installed" for package in packages):
            yield extra
