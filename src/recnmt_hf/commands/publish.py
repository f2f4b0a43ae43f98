"""`recnmt publish`: upload a trained model to the Hub."""

import argparse
import re
import tempfile
from pathlib import Path

from ..errors import UserError
from .arguments import add_card_arguments, card_options, read_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="folder of a run or a trained model")
    add("name", help="name of the repository: user/name, or organisation/name")
    add_card_arguments(parser)
    add("--shard-size", default="50GB", help="maximum size of a file of weights")
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
    if args.dry_run and not args.output:
        raise UserError("usage.requires", field="--dry-run", other="--output")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", args.name):
        raise UserError("hub.name", field=args.name)
    if not re.fullmatch(r"\d+([KMG]i?B)?", args.shard_size):
        size, remedy = "a size in KB, MB or GB", "write e.g. 5GB or 500MB"
        raise UserError("option.value", field="--shard-size", value=args.shard_size, allowed=size, remedy=remedy)
    if args.pull_request and args.tag:
        raise UserError("usage.excludes", field="--tag", other="--pull-request")


def run(args: argparse.Namespace) -> None:
    from ..data.files import partial_folder
    from ..hub.publishing import Destination, files_of, listing, prepare_repository, upload

    card = card_options(args)
    with partial_folder(Path(tempfile.gettempdir())) as temporary:
        output = args.output or temporary / "repository"
        folder = prepare_repository(args.model, output, args.name, shard=args.shard_size, **card)
        print(listing(files_of(folder)), flush=True)
        if args.dry_run:
            print(f"{folder}: nothing was uploaded.")
            return
        names = ("name", "private", "branch", "pull_request", "message", "tag", "collection")
        print(upload(folder, read_options(Destination, args, names)))
