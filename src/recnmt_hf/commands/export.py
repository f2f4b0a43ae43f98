"""`recnmt export`: export a trained model for an inference engine."""

import argparse

from ..errors import UserError
from .arguments import MODEL_HELP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help=MODEL_HELP)
    add("output", help="a new folder")
    formats = "ctranslate2 (base Transformers only) or onnx (all families); `recnmt translate` reads both"
    add("--format", choices=("ctranslate2", "onnx"), required=True, help=formats)
    types = "data type of ctranslate2: float32, int8, float16, bfloat16, int16, int8_float16, ... (onnx: float32 only)"
    add("--quantization", default="float32", help=types)


def check(args: argparse.Namespace) -> None:
    if args.format == "onnx" and args.quantization != "float32":
        raise UserError("export.quantization", field="--quantization", value=args.quantization)


def run(args: argparse.Namespace) -> None:
    if args.format == "onnx":
        from ..hub.onnx_graphs import export_onnx

        print(export_onnx(args.model, args.output))
    else:
        from ..hub.engines import export_ctranslate2

        print(export_ctranslate2(args.model, args.output, args.quantization))
