"""`recnmt publish`: upload a trained model to the Hub."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from ..models.user_errors import UserError
from .arguments import check_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a run or a trained model")
    parser.add_argument("name", help="name of the repository: user/name, or organisation/name")
    parser.add_argument("--license", help="licence identifier of the Hub, e.g. apache-2.0 or cc-by-4.0")
    parser.add_argument("--sentence", help="example sentence in the card (default: one of the validation set)")
    parser.add_argument("--notes", metavar="FILE", help="Markdown file to insert below the scores of the card")
    parser.add_argument("--template", metavar="FILE", help="Jinja template of the card (default: the package's own)")
    parser.add_argument("--shard-size", default="50GB", help="maximum size of a file of weights (default: 50GB)")
    parser.add_argument("--output", "-o", help="new folder in which the uploaded files are kept (default: none)")
    parser.add_argument("--dry-run", action="store_true", help="write the folder --output without uploading it")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--private", dest="private", action="store_true", default=None, help="create the repository as private"
    )
    group.add_argument("--public", dest="private", action="store_false", help="create the repository as public")
    parser.add_argument("--branch", help="branch of the upload, created if it does not exist (default: main)")
    parser.add_argument("--pull-request", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--message", "-m", help="commit message")
    parser.add_argument("--tag", help="tag for the commit, e.g. v1.0")
    parser.add_argument("--collection", metavar="SLUG", help="collection to add the model to")


def check(args: argparse.Namespace) -> None:
    check_file(args.template)
    if args.dry_run and not args.output:
        raise UserError("--dry-run writes a folder. Remedy: name it with --output.")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", args.name):
        raise UserError(f"{args.name!r} is no name of a repository. Remedy: user/name, of letters, digits, -, _ and .")
    if not re.fullmatch(r"\d+([KMG]i?B)?", args.shard_size):
        raise UserError(f"--shard-size {args.shard_size} is no size. Remedy: e.g. 5GB or 500MB.")
    if args.pull_request and args.tag:
        raise UserError("--tag marks what is in the repository, and --pull-request only proposes. Remedy: give one.")


def run(args: argparse.Namespace) -> None:
    from ..data.files import partial_folder
    from ..data.text import read_lines
    from ..hub.publishing import Destination, files_of, listing, prepare_repository, upload

    notes = None if args.notes is None else "\n".join(read_lines(args.notes))
    with partial_folder(Path(tempfile.gettempdir())) as temporary:
        folder = prepare_repository(
            args.model,
            args.output or temporary / "repository",
            args.name,
            license=args.license,
            sentence=args.sentence,
            notes=notes,
            shard=args.shard_size,
            template=args.template,
        )
        print(listing(files_of(folder)), flush=True)
        if args.dry_run:
            print(f"{folder}: nothing was uploaded.")
            return
        to = Destination(
            name=args.name,
            private=args.private,
            branch=args.branch,
            pull_request=args.pull_request,
            message=args.message,
            tag=args.tag,
            collection=args.collection,
        )
        print(upload(folder, to))
