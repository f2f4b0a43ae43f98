"""`recnmt convert`: convert models from and to MarianMT and Marian, and to ONNX and CTranslate2."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from .arguments import MODEL_HELP, Parser, add_revision


# Format -> endings of the names of folders that select it.
ENDINGS = {"marianmt": ("marianmt",), "onnx": ("onnx",), "ctranslate2": ("ct2", "ctranslate2")}
FORMATS = (*ENDINGS, "marian")


def add_arguments(parser: Parser) -> None:
    add = parser.group("input and output")
    source = "a MarianMT model of transformers, e.g. Helsinki-NLP/opus-mt-en-de; or a Transformer in Marian's own "
    source += "format, a .npz file or a .bin file with generic 8-bit weights (intgemm8). The last two become a model "
    add("model", help=f"{MODEL_HELP}; {source}of this package")
    output = "a new folder; for --to marian a file NAME.npz, beside which its vocabularies and NAME.decoder.yml are "
    parser.add_output(help=f"{output}written")
    formats = "format for a model of this package: onnx (all families), ctranslate2, marianmt or marian (base "
    formats += "Transformers) (default: by the end of the output's name: onnx, ct2, ctranslate2, marianmt or .npz)"
    add("--to", choices=FORMATS, help=formats)
    add("--format", dest="to", choices=FORMATS, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    types = "data type for ctranslate2: float32, int8, float16, bfloat16, int16, int8_float16, ..."
    add("--quantization", default="float32", help=types)
    files = "SentencePiece models (.spm) of source and target, required for .npz and .bin files; may be the same file"
    add("--vocabs", nargs=2, metavar=("SOURCE", "TARGET"), help=files)
    add("--config", help="file for marian-decoder (.yml) with beam size and length penalty, for .npz and .bin files")
    add_revision(add)


def is_file(path: str) -> bool:
    """Return whether a path is a file of Marian, by its name; folders may have any name."""
    return path.endswith((".npz", ".bin")) and not os.path.isdir(path)


def check(args: argparse.Namespace) -> None:
    if is_file(args.model) == (args.vocabs is None) or (args.config is not None and args.vocabs is None):
        raise UserError(
            f"{args.model}: a .npz or .bin file requires --vocabs; other models exclude --vocabs and --config.",
            field=args.model,
        )
    if is_file(args.output) and args.to in (None, "marianmt"):
        args.to = "marian"
    by_name = (name for name, endings in ENDINGS.items() if args.output.rstrip("/").endswith(endings))
    args.format = args.to or next(by_name, None)
    if args.quantization != "float32" and args.format != "ctranslate2":
        raise UserError(
            "--quantization is for CTranslate2; quantize ONNX graphs with onnxruntime.quantization.quantize_dynamic.",
            field="--quantization",
        )


def is_marian(source: str, settings: dict[str, Any]) -> bool:
    """Return whether a folder or model id is a MarianMT model; `UserError` if there is no model."""
    from transformers import PreTrainedConfig

    from .._loading_errors import explained_loading, folder_of_model

    source = folder_of_model(source)
    with explained_loading(source):
        return PreTrainedConfig.get_config_dict(source, **settings)[0].get("model_type") == "marian"


def run(args: argparse.Namespace) -> None:
    from ..hub import engines, marian, marian_files, onnx_graphs

    settings = {} if args.revision is None else {"revision": args.revision}
    if is_file(args.model):
        print(marian_files.import_marian_file(args.model, args.vocabs, args.output, args.config))
    elif is_marian(args.model, settings):
        if args.to is not None:
            message = f"{args.model} is a MarianMT model; import it without --to, or export it with Optimum."
            raise UserError(message, field=args.model)
        print(marian.import_marian(args.model, args.output, **settings))
    elif args.format is None:
        raise UserError(f"{args.model} requires --to.", field=args.model)
    else:
        settings |= {"quantization": args.quantization} if args.format == "ctranslate2" else {}
        exports: dict[str, Callable[..., Path]] = {
            "marianmt": marian.export_marian,
            "marian": marian_files.export_marian_file,
            "onnx": onnx_graphs.export_onnx,
            "ctranslate2": engines.export_ctranslate2,
        }
        print(exports[args.format](args.model, args.output, **settings))
