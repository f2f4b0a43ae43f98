"""`recnmt publish`: upload a trained model, or a page to try models, to the Hub."""

import argparse
import tempfile
from pathlib import Path

from ..errors import UserError
from .arguments import Parser, add_card_arguments, card_options, read_options


def add_arguments(parser: Parser) -> None:
    model = "folder of a run or a trained model, followed by the name of the repository, user/name (optional with "
    model += "--card-only); with --space: folders of runs or models, or model ids"
    parser.add_argument("model", nargs="+", metavar="MODEL", help=model)
    add = parser.group("input and output")
    add("--card-only", action="store_true", help="write the card as README.md into the model's folder, without upload")
    add("--name", help=argparse.SUPPRESS)  # of `recnmt card`
    add("--space", metavar="NAME", help="name of a Space, user/name, with the page of `recnmt demo` for these models")
    add("--shard-size", help="maximum size of a file of weights (default: 50GB)")
    add("--output", "-o", metavar="FOLDER", help="new folder for a copy of the uploaded files (default: none)")
    add("--dry-run", action="store_true", help="list the files, and write them to --output, without uploading them")
    add_card_arguments(parser.group("card"))
    add = parser.group("upload")
    add_visibility = parser.groups["upload"].add_mutually_exclusive_group().add_argument
    add_visibility("--private", action="store_true", default=None, help="create the repository as private")
    add_visibility("--public", dest="private", action="store_false", help="create the repository as public")
    add("--branch", help="branch of the upload, created if it does not exist (default: main)")
    add_revision = parser.groups["upload"].add_mutually_exclusive_group().add_argument
    add_revision("--pull-request", action="store_true", help="open a pull request instead of committing")
    add("--message", "-m", help="commit message")
    add_revision("--tag", help="tag for the commit, e.g. v1.0")
    add("--collection", metavar="SLUG", help="collection to add the model to")


def check(args: argparse.Namespace) -> None:
    args.model += [] if args.name is None else [args.name]
    if not args.space and len(args.model) != 2 and not (args.card_only and len(args.model) == 1):
        raise UserError(
            "Pass a model and the name of its repository, as in recnmt publish MODEL USER/NAME, not "
            f"{' '.join(args.model)}. For several models use --space USER/NAME.",
            field=" ".join(args.model),
        )
    args.kind = "space" if args.space else "model"
    args.name = args.space or next(iter(args.model[1:]), None)


def run(args: argparse.Namespace) -> None:
    from ..data.files import partial_folder
    from ..hub.card import write_card
    from ..hub.publishing import Destination, files_of, listing, prepare_repository, upload
    from ..hub.spaces import prepare_space

    if args.card_only:
        print(write_card(args.model[0], args.name, **card_options(args)))
        return
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
