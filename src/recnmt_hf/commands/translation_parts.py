"""
Translate lines with one process, or a file with those of a launcher: the lines are divided into parts, each process
translates its own, and the parts are joined in order. Finished parts are kept until the whole output is complete, so
that an interrupted command continues.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .._plain_text import on_one_line
from ..errors import UserError
from . import arguments


if TYPE_CHECKING:
    from ..inference.translator import Translator


# Lines of a part.
PART = 2000


def inputs_of(args: argparse.Namespace) -> tuple[Iterator[str], Iterator[str] | None]:
    """Return the lines to translate, with their dependency trees, and the prefixes."""
    from ..data.text import read_lines

    prefixes = None if args.prefix is None else read_lines(arguments.stream(args.prefix))
    return arguments.read_sources(arguments.stream(args.input), args.source_trees), prefixes


def write_translations(
    args: argparse.Namespace,
    translator: Translator,
    lines: Iterable[str],
    prefixes: Iterable[str] | None,
    out: IO[str],
    first: int = 0,
    trace: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Write the translations of lines in the format of the arguments; the number of the first line is `first`."""
    scores = args.format != "text" or trace is not None
    translations = translator.translate(lines, args.options, prefixes, scores, first=first + 1, trace=trace)
    for line, translation in enumerate(arguments.progress(translations, "sentences", out=out), start=first):
        if args.format == "text":
            print(on_one_line(translation.text), file=out)
        for one in translation.hypotheses:
            if args.format == "n-best":
                print(f"{line} ||| {on_one_line(one.text)} ||| {one.log_prob:.6f} ||| {one.score:.6f}", file=out)
            elif args.format == "jsonl":
                record = {"line": line, "source": translation.source, **vars(one)}
                omitted = {"alignment": None, "parts": 1}
                record = {name: value for name, value in record.items() if value != omitted.get(name, ...)}
                print(json.dumps(record, ensure_ascii=False), file=out)
        if (line + 1) % args.buffer == 0:
            out.flush()  # for a reader that waits for its answers


def launched_processes() -> tuple[int, int]:
    """Return the number of this process and of all processes that a launcher such as `accelerate launch` started."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def translate_in_parts(args: argparse.Namespace) -> None:
    """Translate `args.input` to `args.output` as one of the processes of a launcher."""
    from ..data.files import lock, open_output
    from ..training.processes import logger

    rank, world = launched_processes()
    inputs = [Path(path) for path in (args.input, args.prefix, args.source_trees) if path is not None]
    is_pipe = any(path.exists() and not (path.is_file() or path.is_dir()) for path in inputs)
    if "-" in (args.input, args.output, args.prefix) or is_pipe or args.trace is not None:
        raise UserError("Several processes need --input and --output that are files, without --trace.")
    folder = folder_of_parts(args)
    if rank > 0:
        translate_together(args, folder, rank, world)
        return
    with open_output(args.output, inputs) as out:
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / ".lock"):
            if finished := len(list(folder.glob("[0-9]" * 8))):
                logger.info(f"{finished} parts in {folder} are complete already.")
            translate_together(args, folder, rank, world)
            for number, *_ in parts_of(*inputs_of(args)):
                with open(folder / f"{number:08d}", encoding="utf-8", newline="\n") as part:
                    shutil.copyfileobj(part, out)
    shutil.rmtree(folder)


def folder_of_parts(args: argparse.Namespace) -> Path:
    """Return the folder of the parts. Its name has a checksum of what decides them: models, options and inputs."""
    from ..data.files import PREFIX, digest_of, digest_of_file

    output = str(Path(args.output).resolve())
    # What this command writes may be in the folder of the model.
    written = re.compile(rf"{re.escape(output)}(\.\w+\.parts/.*)?|.*/{re.escape(PREFIX)}.*", re.DOTALL)
    files = [path for model in args.model if Path(model).is_dir() for path in sorted(Path(model).rglob("*"))]
    files = [path for path in files if path.is_file() and not written.fullmatch(str(path.resolve()))]
    weights = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    inputs = [digest_of_file(path) for path in (args.input, args.prefix, args.source_trees) if path]
    names = ("model", "format", "dtype", "quantization")
    settings = [asdict(args.options), {name: getattr(args, name) for name in names}]
    return Path(f"{args.output}.{digest_of([PART, weights, inputs, settings])[:12]}.parts")


def translate_together(args: argparse.Namespace, folder: Path, rank: int, world: int) -> None:
    """Translate the parts of this process, once the folder is there, and wait for the other processes."""
    from accelerate import PartialState

    state = PartialState(cpu=args.device == "cpu")
    state.wait_for_everyone()
    translate_own_parts(args, folder, rank, world)
    state.wait_for_everyone()
    state.destroy_process_group()


def translate_own_parts(args: argparse.Namespace, folder: Path, rank: int, world: int) -> None:
    """Translate every `world`-th part that is not there yet, from the `rank`-th on."""
    import torch

    args, translator = argparse.Namespace(**vars(args)), None
    torch.set_num_threads(max((os.cpu_count() or 1) // world, 1))
    if args.device is None and args.quantization is None and torch.cuda.is_available():
        args.device = f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % torch.cuda.device_count()}"
    for number, lines, prefixes in parts_of(*inputs_of(args)):
        path = folder / f"{number:08d}"
        if number % world == rank and not path.exists():
            translator = translator or arguments.load_translator(args)
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            with open(partial, "w", encoding="utf-8", newline="\n") as out:
                write_translations(args, translator, lines, prefixes, out, number * PART)
            os.replace(partial, path)


def parts_of(
    lines: Iterator[str], prefixes: Iterator[str] | None
) -> Iterator[tuple[int, Sequence[str], Sequence[str] | None]]:
    """Yield the number, lines and prefixes of each part."""
    number = count = 0
    while part := list(islice(lines, PART)):
        yield number, part, None if prefixes is None else list(islice(prefixes, len(part)))
        number, count = number + 1, count + len(part)
    if prefixes is not None and next(prefixes, None) is not None:
        raise UserError(f"There are only {count} sentences, but more prefixes.", field="sentences")
