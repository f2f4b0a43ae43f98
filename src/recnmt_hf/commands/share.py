"""Commands that pass models on: `recnmt publish`, `convert`."""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from .arguments import MODEL_HELP, REVISION_HELP, Parser, read_options


# Format -> endings of the names of folders that select it.
ENDINGS = {"marianmt": ("marianmt",), "onnx": ("onnx",), "ctranslate2": ("ct2", "ctranslate2")}
FORMATS = (*ENDINGS, "marian")


def add_publish(parser: Parser) -> None:
    model = "folder of a run or model, and the name of the repository, user/name; with --space: folders or model ids"
    parser.add_argument("model", nargs="+", metavar="MODEL", help=model)
    add = parser.group("input and output")
    add("--card-only", action="store_true", help="write the card as README.md into the model's folder, without upload")
    add("--name", help=argparse.SUPPRESS)  # of `recnmt card`
    add("--space", metavar="NAME", help="name of a Space, user/name, with the page of `recnmt demo` for these models")
    add("--shard-size", help="maximum size of a file of weights (default: 50GB)")
    add("--output", "-o", metavar="FOLDER", help="new folder for a copy of the uploaded files (default: none)")
    add("--dry-run", action="store_true", help="list the files, and write them to --output, without uploading them")
    add = parser.group("card")
    add("--license", help="licence identifier of the Hub, e.g. apache-2.0 or cc-by-4.0")
    add("--sentence", help="example sentence in the card (default: one of the validation set)")
    add("--notes", help="Markdown file to insert below the scores of the card")
    add("--template", help="Jinja template of the card (default: the package's own)")
    add, add_visibility, add_commit = parser.group("upload"), parser.exclusive("upload"), parser.exclusive("upload")
    add_visibility("--private", action="store_true", default=None, help="create a private repository")
    add_visibility("--public", dest="private", action="store_false", help="create a public repository (default)")
    add("--branch", help="branch of the upload, created if it does not exist (default: main)")
    add_commit("--pull-request", action="store_true", help="open a pull request instead of committing")
    add_commit("--tag", help="tag for the commit, e.g. v1.0")
    add("--message", "-m", help="commit message")


def run_publish(args: argparse.Namespace) -> None:
    from ..data.files import partial_folder
    from ..data.text import read_lines
    from ..hub.card import write_card
    from ..hub.publishing import Destination, listing, prepare_repository, prepare_space, upload
    from ..inference.codec import check_text

    models = [*args.model, *([] if args.name is None else [args.name])]
    if not args.space and len(models) != 2 and not (args.card_only and len(models) == 1):
        words = " ".join(models)
        raise UserError(f"Pass MODEL USER/NAME, or several models with --space USER/NAME, not {words}.", field=words)
    args.kind = "space" if args.space else "model"
    args.name = args.space or next(iter(models[1:]), None)
    check_text(args.sentence or "", "--sentence")
    check_text(args.name or "", "--name")
    notes = None if args.notes is None else "\n".join(read_lines(args.notes, "\r\n"))
    card = {"license": args.license, "sentence": args.sentence, "notes": notes, "template": args.template}
    if args.card_only:
        print(write_card(models[0], args.name, **card))
        return
    with partial_folder(Path(tempfile.gettempdir())) as temporary:
        output = args.output or temporary / "repository"
        if args.space:
            folder = prepare_space(models, output, args.name, args.license)
        else:
            shard = {} if args.shard_size is None else {"shard": args.shard_size}
            folder = prepare_repository(models[0], output, args.name, **shard, **card)
        print(listing(folder), flush=True)
        if args.dry_run:
            print(f"{folder}: nothing was uploaded.")
            return
        names = ("name", "kind", "private", "branch", "pull_request", "message", "tag")
        print(upload(folder, read_options(Destination, args, names)))


def add_convert(parser: Parser) -> None:
    add = parser.group("input and output")
    source = "a MarianMT model of transformers, or a .npz or .bin file (intgemm8) of Marian, to import"
    add("model", help=f"{MODEL_HELP}, to export; {source}")
    parser.add_output(help="a new folder; for --to marian a file NAME.npz, beside which its other files are written")
    formats = "format of an export: onnx (all families), or for base Transformers ctranslate2, marianmt or marian "
    formats += "(default: from the suffix of --output: onnx, ct2, ctranslate2, marianmt or .npz)"
    add("--to", choices=FORMATS, help=formats)
    add("--format", dest="to", choices=FORMATS, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--quantization", default="float32", help="data type for ctranslate2: float32, int8, float16, bfloat16, ...")
    files = "SentencePiece models (.spm) of source and target, required for .npz and .bin files; may be the same file"
    add("--vocabs", nargs=2, metavar=("SOURCE", "TARGET"), help=files)
    add("--config", help="file for marian-decoder (.yml) with beam size and length penalty, for .npz and .bin files")
    add("--revision", help=REVISION_HELP)


def run_convert(args: argparse.Namespace) -> None:
    from transformers import PreTrainedConfig

    from .._loading_errors import explained_loading, folder_of_model
    from ..hub import engines, marian, marian_files, onnx_graphs

    def is_file(path: str) -> bool:  # of Marian, by its name; folders may have any name
        return path.endswith((".npz", ".bin")) and not os.path.isdir(path)

    if is_file(args.model) == (args.vocabs is None) or (args.config is not None and args.vocabs is None):
        message = f"{args.model}: --vocabs and --config are for .npz and .bin only, which require --vocabs."
        raise UserError(message, field=args.model)
    if is_file(args.output) and args.to in (None, "marianmt"):
        args.to = "marian"
    by_name = (name for name, endings in ENDINGS.items() if args.output.rstrip("/").endswith(endings))
    chosen = args.to or next(by_name, None)
    if args.quantization != "float32" and chosen != "ctranslate2":
        message = "--quantization is for CTranslate2; quantize ONNX graphs with onnxruntime's quantize_dynamic."
        raise UserError(message, field="--quantization")
    if is_file(args.model):
        print(marian_files.import_marian_file(args.model, args.vocabs, args.output, args.config))
        return
    settings: dict[str, Any] = {} if args.revision is None else {"revision": args.revision}
    folder = folder_of_model(args.model)
    with explained_loading(folder):
        is_marian = PreTrainedConfig.get_config_dict(folder, **settings)[0].get("model_type") == "marian"
    if is_marian:
        if args.to is not None:
            message = f"{args.model} is a MarianMT model; import it without --to, or export it with Optimum."
            raise UserError(message, field=args.model)
        print(marian.import_marian(args.model, args.output, **settings))
        return
    if chosen is None:
        raise UserError(f"{args.model} requires --to.", field=args.model)
    settings |= {"quantization": args.quantization} if chosen == "ctranslate2" else {}
    exports: dict[str, Callable[..., Path]] = {
        "marianmt": marian.export_marian,
        "marian": marian_files.export_marian_file,
        "onnx": onnx_graphs.export_onnx,
        "ctranslate2": engines.export_ctranslate2,
    }
    print(exports[chosen](args.model, args.output, **settings))
