"""Corpora, tokenizers, batches."""

from .batching import TokenBatchSampler
from .corpora import Corpus, load_pairs, prepare_dataset
from .generated import generate_corpus
from .text import SentencePair
from .tokenization import load_tokenizer, train_tokenizer
from .tokenizer_pair import TokenizerPair


__all__ = [
    "Corpus",
    "SentencePair",
    "TokenBatchSampler",
    "TokenizerPair",
    "generate_corpus",
    "load_pairs",
    "load_tokenizer",
    "prepare_dataset",
    "train_tokenizer",
]
