"""`recnmt publish`: upload a trained model, or a page to try models, to the Hub."""

import argparse
import re
import tempfile
from pathlib import Path

from ..errors import UserError
from .arguments import add_card_arguments, card_options, read_options


# Options of a model's card and weights, which a Space does not have.
OF_A_MODEL = ("sentence", "notes", "template", "shard_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        nargs="+",
        metavar="MODEL",
        help="folder of a run or a trained model, followed by the name of the repository, user/name; with --space: "
        "folders of runs or models, or model ids",
    )
    add("--space", metavar="NAME", help="name of a Space, user/name, with the page of `recnmt demo` for these models")
    add_card_arguments(parser)
    add("--shard-size", help="maximum size of a file of weights (default: 50GB)")
    add("--output", "-o", help="new folder for a copy of the uploaded files (default: none)")
    add("--dry-run", action="store_true", help="write the folder --output without uploading it")
    add_visibility = parser.add_mutually_exclusive_group().add_argument
    add_visibility("--private", action="store_true", default=None, help="create the repository as private")
    add_visibility("--public", dest="private", action="store_false", help="create the repository as public")
    add("--branch", help="branch of the upload, created if it does not exist (default: main)")
    add("--pull-request", action="store_true", help="open a pull request instead of committing")
    add("--message", "-m", help="commit message")
    add("--tag", help="tag for the commit, e.g. v1.0")
    add("--collection", metavar="SLUG", help="collection to add the model to")


def check(args: argparse.Namespace) -> None:
    args.kind, args.name = ("space", args.space) if args.space else ("model", args.model[-1])
    if args.space:
        for name in OF_A_MODEL:
            if getattr(args, name) is not None:
                raise UserError("usage.excludes", field="--space", other=f"--{name.replace('_', '-')}")
    elif len(args.model) != 2:
        raise UserError("publish.arguments", field=" ".join(args.model))
    if args.dry_run and not args.output:
        raise UserError("usage.requires", field="--dry-run", other="--output")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", args.name):
        raise UserError("hub.name", field=args.name)
    if args.shard_size is not None and not re.fullmatch(r"\d+([KMG]i?B)?", args.shard_size):
        size, remedy = "a size in KB, MB or GB", "write e.g. 5GB or 500MB"
        raise UserError("option.value", field="--shard-size", value=args.shard_size, allowed=size, remedy=remedy)
    if args.pull_request and args.tag:
        raise UserError("usage.excludes", field="--tag", other="--pull-request")


def run(args: argparse.Namespace) -> None:
    from ..data.files import partial_folder
    from ..hub.publishing import Destination, files_of, listing, prepare_repository, upload
    from ..hub.spaces import prepare_space

    with partial_folder(Path(tempfile.gettempdir())) as temporary:
        output = args.output or temporary / "repository"
        if args.space:
            folder = prepare_space(args.model, output, args.name, args.license)
        else:
            shard = {} if args.shard_size is None else {"shard": args.shard_size}
            folder = prepare_repository(args.model[0], output, args.name, **shard, **card_options(args))
        print(listing(files_of(folder)), flush=True)
        if args.dry_run:
            print(f"{folder}: nothing was uploaded.")
            return
        names = ("name", "kind", "private", "branch", "pull_request", "message", "tag", "collection")
        print(upload(folder, read_options(Destination, args, names)))
