"""`recnmt export`: export a trained model for an inference engine."""

from __future__ import annotations

import argparse

from ..models.user_errors import UserError


FORMATS = ("ctranslate2", "onnx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a trained model, or a model id of the Hub")
    parser.add_argument("output", help="a new folder")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        required=True,
        help="ctranslate2 (base Transformers only) or onnx (all families); `recnmt translate` reads both",
    )
    parser.add_argument(
        "--quantization",
        default="float32",
        help="data type of ctranslate2: float32, float16, bfloat16, int16, int8, int8_float16, ... (default: float32)",
    )


def run(args: argparse.Namespace) -> None:
    if args.format == "onnx":
        if args.quantization != "float32":
            raise UserError(
                "Graphs of ONNX are written in float32. Remedy: leave --quantization out; ONNX Runtime's own tools "
                "quantize them."
            )
        from ..hub.onnx_graphs import export_onnx

        print(export_onnx(args.model, args.output))
        return
    from ..hub.engines import QUANTIZATIONS, export_ctranslate2

    if args.quantization not in QUANTIZATIONS:
        raise UserError(f"There is no quantization {args.quantization!r}. Remedy: one of {', '.join(QUANTIZATIONS)}.")
    print(export_ctranslate2(args.model, args.output, args.quantization))
