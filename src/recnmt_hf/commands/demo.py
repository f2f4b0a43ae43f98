"""`recnmt demo`: serve a local web page to try trained models."""

import argparse

from ..demo.limits import Limits
from ..options import options_of
from . import arguments


LIMITS = list(options_of(Limits))
LOADING = ("device", "dtype", "quantization", "trust_remote_code", "revision")


def add_arguments(parser: arguments.Parser) -> None:
    add = parser.group("server")
    parser.add_argument("model", nargs="+", help=f"{arguments.MODEL_HELP}; several are shown side by side")
    add("--host", default="127.0.0.1", help="address of the server; 0.0.0.0 accepts connections from other machines")
    names = "further name under which browsers may reach the page, such as that of a proxy; repeat for several; *: any"
    add("--allow-host", action="append", default=[], metavar="NAME", help=names)
    add("--port", type=arguments.whole(1, 65535), help="port of the server (default: the first free one from 7860)")
    add("--share", action="store_true", help="create a public link through Gradio's servers")
    add("--open", action="store_true", help="open the page in the default browser")
    arguments.add_options(parser, Limits, LIMITS, "limits")
    arguments.add_device_arguments(parser)


def check(args: argparse.Namespace) -> None:
    arguments.read_options(Limits, args, LIMITS)


def run(args: argparse.Namespace) -> None:
    from ..demo.serving import serve

    limits = {name: getattr(args, name) for name in LIMITS}
    loading = {name: value for name in LOADING if (value := getattr(args, name)) is not None}
    page = {"port": args.port, "share": args.share, "open_browser": args.open, "allowed_hosts": args.allow_host}
    serve(args.model, args.host, loading=loading, **page, **limits)
