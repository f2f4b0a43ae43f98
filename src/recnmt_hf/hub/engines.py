"""Export of base Transformers to CTranslate2, an engine in C++ for CPU and CUDA."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from ..data.files import open_output_folder
from ..data.tokenizer_pair import TokenizerPair
from ..errors import packages_of_extra
from ..inference.model_settings import ENGINE_SETTINGS
from ..training.evidence import Evidence
from .checked_copy import check_fields, load_checked


# Name of an activation in transformers -> in CTranslate2.
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_new": "GELUTanh", "quick_gelu": "GELUSigmoid", "swish": "SWISH"}
ACTIVATIONS["silu"] = "SWISH"


def export_ctranslate2(source: str | Path, output: str | Path, quantization: str = "float32", **kwargs: Any) -> Path:
    """
    Export a base Transformer to CTranslate2, with its tokenizers. `Translator.from_pretrained` and `recnmt translate`
    load the folder like that of a model.

    Args:
        source (`str` or `Path`): Folder or model id of an `nmt_transformer` with absolute positions, or with relative
            positions shared by the heads.
        output (`str` or `Path`): A new folder, which is returned.
        quantization (`str`, *optional*, defaults to `"float32"`): Data type of the weights: `"float32"`, `"float16"`,
            `"bfloat16"`, `"int16"`, `"int8"`, or `"int8"` with the type of other weights (`"int8_float16"`, ...).
        **kwargs: Those of `from_pretrained`, e.g. `revision=...`.

    Raises:
        UserError: CTranslate2 is not installed or does not support the model, or the files are damaged.
        FileExistsError: The output exists and is not empty.
    """
    with packages_of_extra("engines", "CTranslate2"):
        import ctranslate2  # type: ignore[import-untyped]  # noqa: F401
    model, tokenizers = load_checked(source, **kwargs)
    needed: dict[str, tuple[Any, ...]] = {
        "self_attention_type": ("absolute", "relative"),
        **dict.fromkeys(("decoder_autoregression", "encoder_mixer"), ("self_attention",)),
        "activation_function": tuple(ACTIVATIONS),
        "layer_norm_eps": (1e-5,),
    }
    if getattr(model.config, "self_attention_type", None) == "relative":
        needed |= {"relative_per_head": (False,), "position_embedding_type": ("none",)}
    check_fields(model.config, "CTranslate2", needed)
    specification = specification_of(model.float(), tokenizers)
    specification.validate()
    specification.optimize(quantization=quantization)
    with open_output_folder(output, must_be_new=True) as working:
        specification.save(str(working))
        tokenizers.save(working)
        write_settings(model, source, working, format="ctranslate2", quantization=quantization)
    return Path(output)


def write_settings(model: Any, source: str | Path, folder: Path, **settings: str) -> None:
    """Write the configurations and the evidence of an exported model, without test scores of the original."""
    settings_of_model = {"config": model.config.to_dict(), "generation_config": model.generation_config.to_dict()}
    text = json.dumps(settings_of_model | settings, indent=1, ensure_ascii=False)
    (folder / ENGINE_SETTINGS).write_text(text, encoding="utf-8")
    evidence = Evidence.load(source) if Path(source).is_dir() else Evidence()
    evidence.tests = []
    evidence.save(folder)


def specification_of(model: Any, tokenizers: TokenizerPair) -> Any:
    """Return a model as a specification of CTranslate2. The layers have the names of BART, which its loader reads."""
    from ctranslate2.converters.transformers import BartLoader  # type: ignore[import-untyped]
    from ctranslate2.specs import common_spec, transformer_spec  # type: ignore[import-untyped]

    config = model.config

    class Loader(BartLoader):
        def set_common_layers(self, spec: Any, module: Any) -> None:
            tables = spec.embeddings if isinstance(spec.embeddings, list) else [spec.embeddings]
            self.set_embeddings(tables[0], module.embed_tokens)
            spec.scale_embeddings = math.sqrt(config.d_model) if config.scale_embedding else 1.0
            if config.normalize_before:
                self.set_layer_norm(spec.layer_norm, module.layer_norm)
            if hasattr(spec, "position_encodings"):
                if (positions := module.embed_input.embed_positions) is None:
                    table = torch.zeros(config.max_position_embeddings, config.d_model)
                else:
                    table = positions.weight if hasattr(positions, "weight") else positions.table
                spec.position_encodings.encodings = table

        def set_attention(self, spec: Any, attention: Any, self_attention: bool = False) -> None:
            super().set_attention(spec, attention, self_attention)
            if hasattr(spec, "relative_position_keys"):
                spec.relative_position_keys = attention.relative_keys[0]
                spec.relative_position_values = attention.relative_values[0]

    shared = {
        "pre_norm": config.normalize_before,
        "activation": getattr(common_spec.Activation, ACTIVATIONS[config.activation_function]),
        "relative_position": config.self_attention_type == "relative",
    }
    encoder = transformer_spec.TransformerEncoderSpec(config.encoder_layers, config.encoder_attention_heads, **shared)
    decoder = transformer_spec.TransformerDecoderSpec(config.decoder_layers, config.decoder_attention_heads, **shared)
    specification = transformer_spec.TransformerSpec(encoder, decoder)
    loader = Loader()
    loader.set_encoder(specification.encoder, model.model.encoder)
    loader.set_decoder(specification.decoder, model.model.decoder)
    loader.set_linear(specification.decoder.projection, model.lm_head)
    if model.final_logits_bias is not None:
        specification.decoder.projection.bias = model.final_logits_bias[0]
    source = symbols_of(tokenizers.source, config.vocab_size)
    target = symbols_of(tokenizers.target, config.decoder_vocab_size)
    specification.register_source_vocabulary(source)
    specification.register_target_vocabulary(target)
    ends = model.generation_config.eos_token_id or config.eos_token_id
    specification.config.eos_token = target[ends[0] if isinstance(ends, list) else ends]
    specification.config.decoder_start_token = specification.config.bos_token = target[config.decoder_start_token_id]
    specification.config.unk_token = source[tokenizers.source.unk_token_id or 0]
    return specification


def symbols_of(tokenizer: Any, rows: int) -> list[str]:
    """Return a name for each row of an embedding: the symbols of the tokenizer, and `<row N>` for rows beyond them."""
    symbols = {number: symbol for symbol, number in tokenizer.get_vocab().items()}
    return [symbols.get(number, f"<row {number}>") for number in range(rows)]
