"""
Translation models from research papers for the Hugging Face ecosystem: mechanisms for recurrence, word order, global
context, latent variables and syntax.

Importing the package imports its models and registers them with transformers' Auto classes, and the pipeline task
`recnmt-translation`. Everything else is imported on first use.
"""

# ruff: noqa: F403
from typing import TYPE_CHECKING

from ._lazy import lazy_names
from ._registration import is_command, register
from ._version import __version__
from .families import FAMILIES, MODEL_TYPES


if TYPE_CHECKING:
    from .data.batching import TokenBatchSampler as TokenBatchSampler
    from .data.generated import generate_corpus as generate_corpus
    from .data.prepared import prepare_dataset as prepare_dataset
    from .data.tokenization import train_tokenizer as train_tokenizer
    from .data.tokenizer_pair import TokenizerPair as TokenizerPair
    from .errors import UserError as UserError
    from .hub.card import write_card as write_card
    from .hub.engines import export_ctranslate2 as export_ctranslate2
    from .hub.marian import export_marian as export_marian
    from .hub.marian import from_marian as from_marian
    from .hub.marian import import_marian as import_marian
    from .hub.marian import to_marian as to_marian
    from .hub.marian_files import export_marian_file as export_marian_file
    from .hub.marian_files import import_marian_file as import_marian_file
    from .hub.publishing import prepare_repository as prepare_repository
    from .inference.decoding import VaswaniLengthPenalty as VaswaniLengthPenalty
    from .inference.options import DecodingOptions as DecodingOptions
    from .inference.pipeline import TranslationPipeline as TranslationPipeline
    from .inference.pipeline import pipeline as pipeline
    from .inference.translator import Translator as Translator
    from .inference.translator import align_pairs as align_pairs
    from .metrics.alignment import AlignmentErrorRate as AlignmentErrorRate
    from .metrics.bleu import Bleu as Bleu
    from .metrics.bleu import ChrF as ChrF
    from .metrics.bleu import Ter as Ter
    from .metrics.bleu import TokenizedBleu as TokenizedBleu
    from .metrics.rouge import Rouge as Rouge
    from .metrics.significance import compare_systems as compare_systems
    from .models.configuration_biarn_transformer import BiARNTransformerConfig as BiARNTransformerConfig
    from .models.configuration_gcn_rnmt import GCNRNMTConfig as GCNRNMTConfig
    from .models.configuration_gret import GRETConfig as GRETConfig
    from .models.configuration_nmt_transformer import NMTTransformerConfig as NMTTransformerConfig
    from .models.configuration_onlstm_transformer import ONLSTMTransformerConfig as ONLSTMTransformerConfig
    from .models.configuration_rnmt import RNMTConfig as RNMTConfig
    from .models.configuration_rpe_transformer import RPETransformerConfig as RPETransformerConfig
    from .models.configuration_vrnmt import VRNMTConfig as VRNMTConfig
    from .models.modeling_biarn_transformer import *
    from .models.modeling_gcn_rnmt import *
    from .models.modeling_gret import *
    from .models.modeling_nmt_transformer import *
    from .models.modeling_onlstm_transformer import *
    from .models.modeling_rnmt import *
    from .models.modeling_rpe_transformer import *
    from .models.modeling_vrnmt import *
    from .training.arguments import TranslationTrainingArguments as TranslationTrainingArguments
    from .training.checkpoints import average_checkpoints as average_checkpoints
    from .training.recipe import Recipe as Recipe
    from .training.run import train as train
    from .training.trainer import TranslationTrainer as TranslationTrainer

_of_families = {name: module for family in FAMILIES.values() for name, module in family.class_modules.items()}
__getattr__, __dir__, _lazy_names = lazy_names(__name__, **_of_families)
__all__ = ["MODEL_TYPES", "__version__", *_lazy_names]

if not is_command():
    register()
