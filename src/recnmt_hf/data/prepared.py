"""Tokenized datasets, made from corpora and cached on disk."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

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
from ..options import check_value
from .alignments import links_of_pairs
from .corpora import Corpora, parse_corpora
from .files import digest_of, partial_folder, remove
from .languages import in_languages, language_ids
from .records import Sentence, Tokens
from .text import ON_LONG
from .tree_inputs import TreeEncoder, columns_of_trees, tree_columns


T = TypeVar("T")
logger = logging.get_logger(__name__)

# Version of the preparation; part of the name of prepared data.
PREPARATION = 2
# Pairs that are tokenized at once; the encodings of more would take gigabytes.
TOKENIZED_AT_ONCE = 2000
# Share of unknown tokens above which a warning is logged.
UNKNOWN_SHARE = 0.01
# Columns of all prepared data, with those of a text, a tree or languages where there are any.
TOKENS, LENGTHS = ("input_ids", "labels"), ("source_length", "target_length")
IDS = pa.list_(pa.int64())
TYPES: dict[str, pa.DataType] = {
    **dict.fromkeys(("source", "target", "source_lang", "target_lang"), pa.string()),
    **dict.fromkeys(("source_tokens", "source_relations"), pa.list_(pa.string())),
    "source_heads": pa.list_(pa.int32()),
    "input_ids": pa.list_(pa.int32()),
    **dict.fromkeys(LENGTHS, pa.int64()),
}


def tokenize_pairs(
    pairs: Sequence[Sequence[Sentence]],
    codes: Mapping[str, str | None],
    tokenizers: Iterable[PreTrainedTokenizerBase],
    most: tuple[int, int] | None = None,
    trees: TreeEncoder | None = None,
    links: bool = False,
    keep_text: bool = False,
) -> dict[str, list[Any]]:
    """
    Return the columns of prepared data for pairs: token ids, truncated to `most` tokens, and lengths, with `links`
    those between the tokens, with `trees` the inputs of models that read them. Control tokens in the sentences, such as
    `</s>`, are text. `codes` are those of [`~recnmt_hf.data.Corpus.language_columns`].
    """
    source_tokenizer, target_tokenizer = tokenizers = tuple(tokenizers)
    texts = {side: [pair[number].text for pair in pairs] for number, side in enumerate(("source", "target"))}
    columns: dict[str, list[Any]] = {}
    if keep_text:
        columns |= texts
        columns |= columns_of_trees(source.tree for source, _ in pairs) if trees else {}
        columns |= {name: [code] * len(pairs) for name, code in codes.items()}
    languages = codes.get("source_lang"), codes.get("target_lang")
    with in_languages(source_tokenizer, languages[0], None), in_languages(target_tokenizer, None, languages[1]):
        ids = [ids_of_texts(source_tokenizer, texts["source"]), ids_of_texts(target_tokenizer, texts["target"], True)]
        inputs_of_trees: dict[str, list[Any]] = {}
        if trees or most:
            rows = [list(map(Tokens, side)) for side in ids]
            if trees:
                parsed = {row: source.tree for row, (source, _) in enumerate(pairs) if source.tree is not None}
                for row, tokens in zip(parsed, trees(list(parsed.values())), strict=True):
                    rows[0][row] = tokens
            for side, limit in enumerate(most or ()):
                controls = control_ids(tokenizers[side])
                rows[side] = [tokens.truncated(limit, controls) for tokens in rows[side]]
            ids = [[tokens.ids for tokens in side] for side in rows]
            inputs_of_trees = tree_columns(rows[0]) if trees else {}
        columns |= dict(zip(TOKENS, ids, strict=True))
        columns |= {name: list(map(len, side)) for name, side in zip(LENGTHS, ids, strict=True)} | inputs_of_trees
        if links:
            columns["links"] = links_of_pairs(pairs, tokenizers, ids)
    return columns


def fitting(
    columns: Mapping[str, Sequence[int]], most: tuple[int, int], max_ratio: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return which pairs have at most so many source and target tokens, and which have sides of similar lengths."""
    source, target = (np.array(columns[name], dtype=np.int64) for name in LENGTHS)
    fits = (source <= most[0]) & (target <= most[1])
    if max_ratio is None:
        return fits, np.ones_like(fits)
    return fits, np.maximum(source, target) <= float(max_ratio) * np.minimum(source, target)


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
        max_source_length, max_target_length (`int`): Maximum numbers of tokens, end token included.
        max_length_ratio (`float`, *optional*): Pairs whose lengths differ by more than this factor are skipped.
        on_empty (`str`): Treatment of pairs with a blank side: `"error"` or `"skip"`.
        num_proc (`int`, *optional*): Processes that tokenize.
        keep_text (`bool`): Whether to keep the columns `source` and `target`, not truncated.
        on_long (`str`): Treatment of pairs with more tokens: `"skip"` or `"truncate"`.
        trees ([`~recnmt_hf.data.TreeEncoder`], *optional*): For a model that reads dependency trees.

    Returns:
        `datasets.Dataset` with `input_ids`, `labels`, `source_length`, `target_length` (and the text), `links` if a
        corpus has alignments (`[source, target, source, target, ...]`, positions of tokens), and with `trees` also
        `dependency_heads` and `dependency_relations`.

    Raises:
        ValueError, OSError: A setting is not allowed, or a corpus cannot be read.
    """
    check_value("on_long", on_long, Literal[ON_LONG])
    corpora = parse_corpora(corpora)
    tokenizers = {"source": source_tokenizer, "target": target_tokenizer}
    codes = [corpus.language_columns(source_lang, target_lang, tokenizers.values()) for corpus in corpora]
    settings = [
        PREPARATION,
        [corpus.fingerprint() for corpus in corpora],
        [source_lang, target_lang, max_source_length, max_target_length, max_length_ratio, on_empty, keep_text],
        [tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers.values()],
        *([] if on_long == "skip" else [on_long]),
        *([] if trees is None else [trees.fingerprint()]),
    ]
    folder = Path(cache_dir) / digest_of(settings)[:24]
    if folder.is_dir():
        try:
            return load_from_disk(str(folder))
        except (OSError, ValueError):
            logger.warning(f"The prepared data in {folder} is damaged and will be prepared again.")
            remove(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    most = max_source_length, max_target_length
    work = partial(
        tokenize_pairs,
        tokenizers=tuple(tokenizers.values()),
        most=most if on_long == "truncate" else None,
        trees=trees,
        links=any(corpus.alignments for corpus in corpora),
        keep_text=keep_text,
    )

    def batches() -> Iterator[tuple[Any, ...]]:
        for corpus, own in zip(corpora, codes, strict=True):
            rows = corpus.rows(source_lang, target_lang, on_empty)
            yield from ((batch, own) for batch in iter(lambda: list(islice(rows, TOKENIZED_AT_ONCE)), []))  # noqa: B023

    schema = pa.schema([(name, TYPES.get(name, IDS)) for name in work([], codes[0])])
    counts = {side: [0, 0] for side in tokenizers}  # unknown tokens, and all
    total = 0
    with partial_folder(folder.parent) as working:
        path = str(working / "tokenized.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            work_done = in_processes(work, batches(), num_proc or 1)
            for columns in tqdm(work_done, "Tokenizing", unit=f" x {TOKENIZED_AT_ONCE} pairs"):
                table = pa.record_batch(columns, schema)
                total += len(table)
                for (side, tokenizer), name in zip(tokenizers.items(), TOKENS, strict=True):
                    counts[side][0] += count_equal(table[name].flatten(), tokenizer.unk_token_id)
                    counts[side][1] += len(table[name].flatten())
                fits, is_alike = fitting(columns, most, max_length_ratio)
                writer.write_batch(table.filter(pa.array(fits & is_alike)))
        data = Dataset.from_file(path)
        if not len(data):
            raise UserError(f"All {total} sentence pairs exceed the limits of length or their ratio.")
        for side, (unknown, of_side) in counts.items():
            warn_about_unknown(unknown, of_side, side)
        data.save_to_disk(str(working / "done"))
        with suppress(OSError):  # another process finished the same work first
            os.replace(working / "done", folder)
    return load_from_disk(str(folder))


def warn_about_unknown(unknown: int, total: int, side: str | None = None) -> None:
    """Log a warning if more than a few tokens (of a side) are unknown."""
    if unknown > UNKNOWN_SHARE * total:
        of_side = f"{side} " if side else ""
        logger.warning(
            f"{100 * unknown / total:.1f}% of the {of_side}tokens are unknown to the {of_side}tokenizer. Use a larger "
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


# -- several processes -------------------------------------------------------------------------------------------------

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
