"""Corpora, tokenizers, batches."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


if TYPE_CHECKING:
    from .batching import TokenBatchSampler as TokenBatchSampler
    from .corpora import Corpus as Corpus
    from .corpora import load_pairs as load_pairs
    from .generated import generate_corpus as generate_corpus
    from .prepared import ShardSettings as ShardSettings
    from .prepared import prepare_dataset as prepare_dataset
    from .records import ParsedSentence as ParsedSentence
    from .sharded import Mixture as Mixture
    from .sharded import ShardedDataset as ShardedDataset
    from .sharding import prepare_shards as prepare_shards
    from .text import SentencePair as SentencePair
    from .tokenization import load_tokenizer as load_tokenizer
    from .tokenization import train_tokenizer as train_tokenizer
    from .tokenizer_pair import TokenizerPair as TokenizerPair
    from .tree_inputs import Relations as Relations
    from .tree_inputs import TreeCollator as TreeCollator
    from .tree_inputs import TreeEncoder as TreeEncoder
    from .tree_inputs import read_conllu as read_conllu

__getattr__, __dir__, __all__ = lazy_names(__name__)
