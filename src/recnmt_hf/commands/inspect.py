"""`recnmt inspect`: show how a model of this package processes one sentence, as a picture or as text."""

import argparse

from .arguments import PICTURE_HELP, Parser, add_device_arguments, load_translator, whole


def add_arguments(parser: Parser) -> None:
    from ..analysis.subjects import SUBJECTS

    add = parser.group("input and output")
    subjects = "; ".join(f"{subject.name} ({family}): {subject.summary}" for family, subject in SUBJECTS.items())
    add("model", help=f"folder of a trained model ({', '.join(SUBJECTS)}), or a model id of the Hub")
    add("sentence", help="source sentence")
    add("--target", metavar="TEXT", help="translation of the sentence (default: the model's own)")
    add("--output", "-o", help=f"{PICTURE_HELP} (default: text on standard output)")
    add = parser.group("view")
    layer = "layer, counted from 0 (default: 0 for attention and relations, the top layer for global and tree)"
    names = [subject.name for subject in SUBJECTS.values()]
    add("--subject", choices=names, help=f"{subjects} (default: the subject of the model's family)")
    add("--layer", type=whole(0), help=layer)
    add("--head", type=whole(0), help="attention head, counted from 0 (default: mean of all heads)")
    add("--direction", choices=("forward", "backward"), help="direction of the ON-LSTM (default: forward)")
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from ..analysis.plots import check_picture
    from ..analysis.subjects import find_subject, load_function
    from ..inference.codec import check_text

    check_text(args.sentence, "sentence")
    check_text(args.target or "", "--target")
    if args.output is not None:
        check_picture(args.output)
    translator = load_translator(args)
    subject = find_subject(translator.inspected_model().config, args.subject)
    options = {name: value for name in subject.options if (value := getattr(args, name)) is not None}
    print(load_function(subject)(translator, args.sentence, args.output, **options), end="")
