"""`recnmt inspect`: show how a model of this package processes one sentence, as a picture or as text."""

from __future__ import annotations

import argparse

from ..models.user_errors import UserError
from .arguments import add_device_arguments, check_text, load_translator, whole


# Options that not every subject takes.
OPTIONS = ("target", "layer", "head", "direction")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..analysis.subjects import SUBJECTS

    subjects = "; ".join(f"{subject.name} ({family}): {subject.summary}" for family, subject in SUBJECTS.items())
    parser.add_argument("model", help=f"folder of a trained model ({', '.join(SUBJECTS)}), or a model id of the Hub")
    parser.add_argument("sentence", help="source sentence")
    parser.add_argument(
        "--subject",
        choices=[subject.name for subject in SUBJECTS.values()],
        help=f"{subjects} (default: the subject of the model's family)",
    )
    parser.add_argument("--target", help="translation of the sentence (default: the model's own)")
    parser.add_argument("--output", "-o", help=".png, .svg or .pdf file (default: text on standard output)")
    parser.add_argument(
        "--layer", type=whole(0), help="layer, counted from 0 (default: attention 0, others the top one)"
    )
    parser.add_argument("--head", type=whole(0), help="attention head, counted from 0 (default: mean of all heads)")
    parser.add_argument(
        "--direction", choices=("forward", "backward"), help="direction of the ON-LSTM (default: forward)"
    )
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from ..analysis.plots import check_picture
    from ..analysis.subjects import find_subject, load_function

    check_text(args.sentence, "The sentence")
    if args.target is not None:
        check_text(args.target, "The translation")
    if args.output is not None:
        check_picture(args.output)
    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    translator = load_translator(args)
    subject = find_subject(translator.inspected_model().config, args.subject)
    for name in options:
        if name not in subject.options:
            raise UserError(
                f"--{name} has no effect on the subject {subject.name}. Remedy: remove it, or choose another --subject."
            )
    print(load_function(subject)(translator, args.sentence, args.output, **options), end="")
