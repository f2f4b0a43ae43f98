"""Tokenized datasets, made from corpora and cached on disk."""

import gc
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, load_from_disk
from datasets.utils import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .._interrupts import end_with_parent
from .._plain_text import control_ids, encode_plain, ids_of_texts
from ..errors import UserError
from ..options import Range, check_options, option
from .alignments import links_of_pairs
from .corpora import Corpora, parse_corpora
from .files import digest_of, partial_folder
from .languages import in_languages, language_ids
from .records import Sentence, Tokens
from .text import ON_EMPTY, ON_LONG
from .tree_inputs import TreeEncoder, columns_of_trees, tree_columns


T = TypeVar("T")
logger = logging.get_logger(__name__)

TOKENIZED_AT_ONCE = 2000  # pairs; the encodings of more would take gigabytes
SIDES = ("source", "target")
# Columns of all prepared data, and types of columns; the others are lists of numbers.
TOKENS, LENGTHS = ("input_ids", "labels"), ("source_length", "target_length")
TYPES: dict[str, pa.DataType] = {
    **dict.fromkeys((*SIDES, "source_lang", "target_lang"), pa.string()),
    **dict.fromkeys(("source_tokens", "source_relations"), pa.list_(pa.string())),
    **dict.fromkeys(("source_heads", "input_ids"), pa.list_(pa.int32())),
    **dict.fromkeys(LENGTHS, pa.int64()),
}


@dataclass(frozen=True)
class ShardSettings:
    """
    Settings that decide the content of prepared data; `shard_size` is for shards alone. Lengths count tokens, end
    token included; `on_long` is the treatment of longer pairs, `max_length_ratio` limits the ratio of both lengths.
    """

    source_lang: str
    target_lang: str
    max_source_length: int = 256
    max_target_length: int = 256
    max_length_ratio: float | None = None
    on_empty: str = option("error", "treatment of pairs with an empty side", choices=ON_EMPTY)
    on_long: str = option("skip", "treatment of pairs with more tokens", choices=ON_LONG)
    shard_size: Annotated[int, Range(least=1, most=10**7)] = option(100_000, "lines (or rows) of a corpus in a shard")

    def __post_init__(self) -> None:
        check_options(self)


def tokenize_pairs(
    pairs: Sequence[Sequence[Sentence]],
    codes: Mapping[str, str | None],
    tokenizers: Iterable[PreTrainedTokenizerBase],
    settings: ShardSettings,
    trees: TreeEncoder | None = None,
    links: bool = False,
    keep_text: bool = False,
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Return the columns of prepared data for pairs, which ones are not too long, and which have similar lengths."""
    source_tokenizer, target_tokenizer = tokenizers = tuple(tokenizers)
    limits = settings.max_source_length, settings.max_target_length
    sources, targets = ([pair[side].text for pair in pairs] for side in (0, 1))
    columns: dict[str, Any] = {}
    if keep_text:
        columns |= {"source": sources, "target": targets}
        columns |= columns_of_trees(source.tree for source, _ in pairs) if trees else {}
        columns |= {name: [code] * len(pairs) for name, code in codes.items()}
    source_lang, target_lang = codes.get("source_lang"), codes.get("target_lang")
    with in_languages(source_tokenizer, source_lang, None), in_languages(target_tokenizer, None, target_lang):
        ids = [ids_of_texts(source_tokenizer, sources), ids_of_texts(target_tokenizer, targets, is_target=True)]
        edges: dict[str, Any] = {}
        if trees or settings.on_long == "truncate":
            rows = [list(map(Tokens, side)) for side in ids]
            if trees:
                parsed = {row: source.tree for row, (source, _) in enumerate(pairs) if source.tree is not None}
                for row, tokens in zip(parsed, trees(list(parsed.values())), strict=True):
                    rows[0][row] = tokens
            for side, limit in enumerate(limits if settings.on_long == "truncate" else ()):
                controls = control_ids(tokenizers[side])
                rows[side] = [tokens.truncated(limit, controls) for tokens in rows[side]]
            ids = [[tokens.ids for tokens in side] for side in rows]
            edges = tree_columns(rows[0]) if trees else {}
        lengths: list[Any] = [np.array(list(map(len, side)), dtype=np.int64) for side in ids]
        columns |= dict(zip(TOKENS + LENGTHS, ids + lengths, strict=True)) | edges
        if links:
            columns["links"] = links_of_pairs(pairs, tokenizers, ids)
    fits = (lengths[0] <= limits[0]) & (lengths[1] <= limits[1])
    if settings.max_length_ratio is None:
        return columns, fits, np.ones_like(fits)
    return columns, fits, np.maximum(*lengths) <= float(settings.max_length_ratio) * np.minimum(*lengths)


def prepare_dataset(
    corpora: Corpora,
    source_lang: str,
    target_lang: str,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    cache_dir: str | Path,
    max_source_length: int = 256,
    max_target_length: int = 256,
    max_length_ratio: float | None = None,
    on_empty: str = "error",
    num_proc: int | None = None,
    keep_text: bool = False,
    on_long: str = "skip",
    trees: TreeEncoder | None = None,
) -> Dataset:
    """
    Prepare a tokenized dataset once, and load it from `cache_dir` afterwards.

    Args:
        corpora: One corpus or a list of them.
        source_lang, target_lang (`str`): Language codes.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`): May be the same one.
        cache_dir (`str` or `Path`): Folder for prepared data, each under a name made from content and settings.
        max_source_length, max_target_length, max_length_ratio, on_empty, on_long: As in [`ShardSettings`].
        num_proc (`int`, *optional*): Processes that tokenize.
        keep_text (`bool`): Whether to keep the columns `source` and `target`, not truncated.
        trees ([`~recnmt_hf.data.TreeEncoder`], *optional*): For a model that reads dependency trees.

    Returns:
        `datasets.Dataset` with `input_ids`, `labels`, `source_length`, `target_length` (and the text), `links` if a
        corpus has alignments (`[source, target, source, target, ...]`, positions of tokens), and with `trees` also
        `dependency_heads` and `dependency_relations`.

    Raises:
        ValueError, OSError: A setting is not allowed, or a corpus cannot be read.
    """
    limits = max_source_length, max_target_length, max_length_ratio
    settings = ShardSettings(source_lang, target_lang, *limits, on_empty=on_empty, on_long=on_long)
    corpora, tokenizers = parse_corpora(corpora), (source_tokenizer, target_tokenizer)
    codes = [corpus.language_columns(source_lang, target_lang, tokenizers) for corpus in corpora]
    identity = [
        2,  # version of the preparation
        [corpus.fingerprint() for corpus in corpora],
        [source_lang, target_lang, *limits, on_empty, keep_text],
        list(map(tokenizer_fingerprint, tokenizers)),
        *([] if on_long == "skip" else [on_long]),
        *([] if trees is None else [trees.fingerprint()]),
    ]
    folder = Path(cache_dir) / digest_of(identity)[:24]
    if folder.is_dir():
        return load_from_disk(str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    common: dict[str, Any] = {"tokenizers": tokenizers, "settings": settings, "trees": trees, "keep_text": keep_text}
    work: Any = partial(tokenize_pairs, **common, links=any(corpus.alignments for corpus in corpora))
    batches = (
        (batch, own)
        for corpus, own in zip(corpora, codes, strict=True)
        for batch in batched(corpus.rows(source_lang, target_lang, on_empty), TOKENIZED_AT_ONCE)
    )
    schema = pa.schema([(name, TYPES.get(name, pa.list_(pa.int64()))) for name in work([], codes[0])[0]])
    unknown, total = Counter[str](), Counter[str]()
    with partial_folder(folder.parent) as working:
        path = str(working / "tokenized.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            parts = in_processes(work, batches, num_proc or 1)
            for columns, fits, is_alike in tqdm(parts, "Tokenizing", unit=f" x {TOKENIZED_AT_ONCE} pairs"):
                table = pa.record_batch(columns, schema)
                total["pairs"] += len(table)
                for side, name, tokenizer in zip(SIDES, TOKENS, tokenizers, strict=True):
                    ids = table[name].flatten()
                    total[side] += len(ids)
                    unknown[side] += count_equal(ids, tokenizer.unk_token_id)
                writer.write_batch(table.filter(pa.array(fits & is_alike)))
        data = Dataset.from_file(path)
        if not len(data):
            raise UserError(f"All {total['pairs']} pairs exceed max_{{source,target}}_length or max_length_ratio.")
        for side in SIDES:
            warn_about_unknown(unknown[side], total[side], f"{side} ")
        data.save_to_disk(str(working / "done"))
        with suppress(OSError):  # another process finished the same work first
            os.replace(working / "done", folder)
    return load_from_disk(str(folder))


def batched(rows: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` rows; the last one may be shorter."""
    return iter(lambda: list(islice(rows, size)), [])


def warn_about_unknown(unknown: int, total: int, side: str = "") -> None:
    """Log a warning if more than a few tokens (of a side) are unknown."""
    if unknown > 0.01 * total:
        logger.warning(
            f"{100 * unknown / total:.1f}% of the {side}tokens are unknown to the {side}tokenizer. Use a larger "
            "vocabulary, or BPE with bytes for unknown characters."
        )


def count_equal(ids: pa.Array, id: int | None) -> int:
    """Return how often a token id occurs; `None` never does."""
    return 0 if id is None else pc.sum(pc.equal(ids, id)).as_py() or 0


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a checksum that is the same for tokenizers that encode text in the same way."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Settings of a slow tokenizer have no common interface, so compare the encoding of a text, which depends on them.
    probe = "A b-c, 1.5 Ä 你好 </s>" if backend is None else ""
    language = min(language_ids(tokenizer), default=None)  # every text is encoded in its own
    with in_languages(tokenizer, language, language):
        ids = [encode_plain(tokenizer, probe, is_target)["input_ids"] for is_target in (False, True)]
        content = "" if backend is None else backend.to_str()
    if backend is None:
        return digest_of([type(tokenizer).__name__, tokenizer.get_vocab(), ids])
    state = {name: value for name, value in json.loads(content).items() if name not in ("padding", "truncation")}
    return digest_of(state | ({"target_controls": ids[1]} if ids[0] != ids[1] else {}))


_work: list[Callable[..., Any]] = []


def in_processes(work: Callable[..., T], items: Iterable[tuple[Any, ...]], workers: int) -> Iterator[T]:
    """Yield `work(*item)` for each item, in order, from several processes if there are several workers."""
    if workers == 1:
        yield from (work(*item) for item in items)
        return
    # As `datasets` does. Forked processes start at once, and use no threads of libraries.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(work, os.getpid()))
    pending: deque[Future[T]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(do_work, *item))
            if len(pending) >= 2 * workers:  # items take memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(work: Callable[..., Any], parent: int) -> None:
    """Keep the work of a worker process, whose tokenizers have one thread."""
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # else each collection would look through all imported packages
    _work.append(work)


def do_work(*item: Any) -> Any:
    """Do the work of a worker process for an item."""
    return _work[0](*item)
