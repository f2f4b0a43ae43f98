"""Corpora, tokenizers, batches."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names, names_for_type_checkers


if TYPE_CHECKING:
    from .batching import TokenBatchSampler
    from .corpora import Corpus, load_pairs, prepare_dataset
    from .generated import generate_corpus
    from .sharded import Mixture, ShardedDataset
    from .sharding import ShardSettings, prepare_shards
    from .text import SentencePair
    from .tokenization import load_tokenizer, train_tokenizer
    from .tokenizer_pair import TokenizerPair
    from .tree_inputs import Relations, TreeCollator, TreeEncoder
    from .trees import ParsedSentence, read_conllu

__all__ = [
    "Corpus",
    "Mixture",
    "ParsedSentence",
    "Relations",
    "SentencePair",
    "ShardSettings",
    "ShardedDataset",
    "TokenBatchSampler",
    "TokenizerPair",
    "TreeCollator",
    "TreeEncoder",
    "generate_corpus",
    "load_pairs",
    "load_tokenizer",
    "prepare_dataset",
    "prepare_shards",
    "read_conllu",
    "train_tokenizer",
]

__getattr__, __dir__ = lazy_names(__name__, names_for_type_checkers(__name__))
