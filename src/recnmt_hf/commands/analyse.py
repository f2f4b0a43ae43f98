"""Commands that show something: `recnmt inspect`, `env`."""

import argparse
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version

from .._version import __version__
from . import arguments


PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "datasets", "huggingface_hub", "numpy")


def add_inspect(parser: arguments.Parser) -> None:
    from ..analysis.subjects import SUBJECTS

    add = parser.group("input and output")
    subjects = "; ".join(f"{subject.name} ({family}): {subject.summary}" for family, subject in SUBJECTS.items())
    add("model", help=f"folder of a trained model ({', '.join(SUBJECTS)}), or a model id of the Hub")
    add("sentence", help="source sentence")
    add("--target", metavar="TEXT", help="translation of the sentence (default: the model's own)")
    add("--output", "-o", help=f"{arguments.PICTURE_HELP} (default: text on standard output)")
    add = parser.group("view")
    names = [subject.name for subject in SUBJECTS.values()]
    add("--subject", choices=names, help=f"{subjects} (default: the subject of the model's family)")
    layer = "layer, counted from 0 (default: top for global and tree, else 0); ignored for forgetting and positions"
    add("--layer", type=arguments.whole(0), help=layer)
    add("--head", type=arguments.whole(0), help="attention head, counted from 0 (default: mean of all heads)")
    add("--direction", choices=("forward", "backward"), help="direction of the ON-LSTM (default: forward)")
    arguments.add_device_arguments(parser)


def run_inspect(args: argparse.Namespace) -> None:
    from ..analysis.plots import check_picture
    from ..analysis.subjects import find_subject, load_function
    from ..inference.codec import check_text

    check_text(args.sentence, "sentence")
    check_text(args.target or "", "--target")
    if args.output is not None:
        check_picture(args.output)
    translator = arguments.load_translator(args)
    subject = find_subject(translator.inspected_model().config, args.subject)
    options = {name: value for name in subject.options if (value := getattr(args, name)) is not None}
    print(load_function(subject)(translator, args.sentence, args.output, **options), end="")


def run_env(args: argparse.Namespace) -> None:
    import torch

    from ..models.kernels_shared import allowed, has_bfloat16

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    extras: dict[str, list[str]] = {}
    for requirement in requires("recnmt-hf") or ():
        if match := re.match(r"([\w-]+).*extra == ['\"](\w+)", requirement):
            extras.setdefault(match[2], []).append(installed_version(match[1]))
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
        "extras": ", ".join(extra for extra, versions in extras.items() if "not installed" not in versions) or "none",
    }
    for name, value in lines.items():
        print(f"{name}: {value}")


def installed_version(package: str) -> str:
    """Return the version of a package, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
