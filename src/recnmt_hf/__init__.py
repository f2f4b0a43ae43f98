"""
Translation models with recurrence, order and global context for the Hugging Face ecosystem.

Importing the package registers its models with transformers' Auto classes; the models themselves, and everything
else, load when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._registration import MODEL_TYPES, register


__version__ = "0.1.0"

# Public names and the modules that hold them, loaded when first asked for.
_LAZY = {
    "AlignmentErrorRate": "evaluation.alignment",
    "BiARNTransformerConfig": "models.configuration_biarn_transformer",
    "BiARNTransformerForConditionalGeneration": "models.modeling_biarn_transformer",
    "BiARNTransformerModel": "models.modeling_biarn_transformer",
    "BiARNTransformerPreTrainedModel": "models.modeling_biarn_transformer",
    "NMTTransformerConfig": "models.configuration_nmt_transformer",
    "NMTTransformerForConditionalGeneration": "models.modeling_nmt_transformer",
    "NMTTransformerModel": "models.modeling_nmt_transformer",
    "NMTTransformerPreTrainedModel": "models.modeling_nmt_transformer",
    "Bleu": "evaluation.metrics",
    "ChrF": "evaluation.metrics",
    "DecodingOptions": "evaluation.translator",
    "RNMTConfig": "models.configuration_rnmt",
    "RNMTForConditionalGeneration": "models.modeling_rnmt",
    "RNMTModel": "models.modeling_rnmt",
    "RNMTPreTrainedModel": "models.modeling_rnmt",
    "Recipe": "training.recipe",
    "Ter": "evaluation.metrics",
    "TokenBatchSampler": "data.batching",
    "TokenizedBleu": "evaluation.metrics",
    "TranslationPipeline": "evaluation.pipeline",
    "TranslationTrainer": "training.trainer",
    "TranslationTrainingArguments": "training.trainer",
    "Translator": "evaluation.translator",
    "UserError": "models.user_errors",
    "VaswaniLengthPenalty": "evaluation.decoding",
    "align_pairs": "evaluation.alignment",
    "average_checkpoints": "training.checkpoints",
    "compare_systems": "evaluation.significance",
    "from_marian": "hub.marian",
    "generate_corpus": "data.generated",
    "prepare_dataset": "data.corpora",
    "train": "training.run",
    "train_tokenizer": "data.tokenization",
}

__all__ = ["MODEL_TYPES", "__version__", *sorted(_LAZY)]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))


register()
