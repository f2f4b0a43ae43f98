"""Tokenized datasets, made from corpora and cached on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, load_from_disk
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .._plain_text import control_ids, encode_plain, ids_of_texts
from ..errors import UserError
from ..options import check_value
from .alignments import links_of_batch
from .corpora import Corpora, Corpus, parse_corpora
from .files import digest_of, partial_folder, remove
from .languages import in_languages, language_ids
from .records import ParsedSentence, Sentence, Tokens
from .text import ON_LONG
from .tree_inputs import TreeEncoder, tree_columns
from .trees import COLUMNS, columns_of_tree, sentences_of_columns


logger = logging.get_logger(__name__)

# Version of the preparation; part of the name of prepared data.
PREPARATION = 2
# Share of unknown tokens above which a warning is logged.
UNKNOWN_SHARE = 0.01


def tokenize_pairs(
    batch: Mapping[str, list[Any]],
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    most: tuple[int, int] | None = None,
    trees: TreeEncoder | None = None,
) -> dict[str, list[Any]]:
    """
    Return token ids and lengths of a batch of `source` and `target` sentences, truncated to `most` tokens. Control
    tokens in the sentences, such as `</s>`, are text. Columns `source_lang` and `target_lang` have the languages of
    tokenizers that name them by tokens. With a column `alignment` links between the tokens are added. With `trees` the
    batch has columns of trees, and the inputs of models that read them are added.
    """
    if "source_lang" in batch:
        runs: dict[str, list[Any]] = {}
        start = 0
        for languages, run in groupby(zip(batch["source_lang"], batch["target_lang"], strict=True)):
            end = start + sum(1 for _ in run)
            part = {name: batch[name][start:end] for name in batch if name not in ("source_lang", "target_lang")}
            with in_languages(source_tokenizer, languages[0], None), in_languages(target_tokenizer, None, languages[1]):
                made = tokenize_pairs(part, source_tokenizer, target_tokenizer, most, trees)
            for name, values in made.items():
                runs.setdefault(name, []).extend(values)
            start = end
        return runs
    sources = list(map(Tokens, ids_of_texts(source_tokenizer, batch["source"])))
    targets = list(map(Tokens, ids_of_texts(target_tokenizer, batch["target"], is_target=True)))
    if trees is not None:
        sentences = sentences_of_columns(batch["source"], batch)
        parsed = {row: sentence for row, sentence in enumerate(sentences) if isinstance(sentence, ParsedSentence)}
        for row, tokens in zip(parsed, trees(list(parsed.values())), strict=True):
            sources[row] = tokens
    if most is not None:
        controls = control_ids(source_tokenizer), control_ids(target_tokenizer)
        sources = [tokens.truncated(most[0], controls[0]) for tokens in sources]
        targets = [tokens.truncated(most[1], controls[1]) for tokens in targets]
    columns: dict[str, list[Any]] = {
        "input_ids": [tokens.ids for tokens in sources],
        "labels": [tokens.ids for tokens in targets],
        "source_length": list(map(len, sources)),
        "target_length": list(map(len, targets)),
        **({} if trees is None else tree_columns(sources)),
    }
    if "alignment" in batch:
        ids = columns["input_ids"], columns["labels"]
        columns["links"] = links_of_batch(batch, (source_tokenizer, target_tokenizer), ids)
    return columns


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
    tokenizers = (source_tokenizer, target_tokenizer)
    for corpus in corpora:
        corpus.language_columns(source_lang, target_lang, tokenizers)  # reject unknown codes
    settings = [
        PREPARATION,
        [corpus.fingerprint() for corpus in corpora],
        [source_lang, target_lang, max_source_length, max_target_length, max_length_ratio, on_empty, keep_text],
        [tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers],
        *([] if on_long == "skip" else [on_long]),
        *([] if trees is None else [trees.fingerprint()]),
    ]
    key = digest_of(settings)[:24]
    folder = Path(cache_dir) / key
    if folder.is_dir():
        try:
            return load_from_disk(str(folder))
        except (OSError, ValueError):
            logger.warning(f"The prepared data in {folder} is damaged and will be prepared again.")
            remove(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(folder.parent) as working:
        data = collect(corpora, source_lang, target_lang, on_empty, working, trees is not None, tokenizers)
        total = len(data)
        num_proc = max(1, min(num_proc or 1, total // 1000))
        data = data.map(
            tokenize_pairs,
            batched=True,
            fn_kwargs={
                "source_tokenizer": source_tokenizer,
                "target_tokenizer": target_tokenizer,
                "most": (max_source_length, max_target_length) if on_long == "truncate" else None,
                "trees": trees,
            },
            num_proc=num_proc if num_proc > 1 else None,
            remove_columns=[name for name in data.column_names if name == "alignment" or not keep_text],
            desc=f"Tokenizing {total} pairs",
            new_fingerprint=f"{key}-tokenized",
            cache_file_name=str(working / "tokenized.arrow"),
        )
        for side, column, tokenizer in zip(("source", "target"), ("input_ids", "labels"), tokenizers, strict=True):
            if tokenizer.unk_token_id is not None:
                ids = pc.list_flatten(data.data.column(column))
                warn_about_unknown(count_equal(ids, tokenizer.unk_token_id), len(ids), side)
        source, target = (np.array(data[name][:]) for name in ("source_length", "target_length"))
        fits = (source <= max_source_length) & (target <= max_target_length)
        if max_length_ratio is not None:
            fits &= np.maximum(source, target) <= float(max_length_ratio) * np.minimum(source, target)
        if not fits.any():
            raise UserError(f"All {total} sentence pairs exceed the limits of length or their ratio.")
        (data if fits.all() else data.select(np.flatnonzero(fits).tolist())).save_to_disk(str(working / "done"))
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


def count_equal(ids: pa.Array | pa.ChunkedArray, id: int) -> int:
    """Return how often a token id occurs."""
    return pc.sum(pc.equal(ids, id)).as_py() or 0


def collect(
    corpora: Sequence[Corpus],
    source_lang: str,
    target_lang: str,
    on_empty: str,
    working: Path,
    trees: bool = False,
    tokenizers: Sequence[PreTrainedTokenizerBase] = (),
) -> Dataset:
    """
    Write the checked sentence pairs to a dataset with the columns `source` and `target`, `alignment` if a corpus has
    links, with `trees` those of the sources' trees, which are null for a sentence without one, and `source_lang` and
    `target_lang` for `tokenizers` that name languages by tokens.
    """
    from datasets.arrow_writer import ArrowWriter

    path, text = str(working / "pairs.arrow"), pa.string()
    schema: dict[str, Any] = {"source": text, "target": text}
    if has_links := any(corpus.alignments for corpus in corpora):
        schema["alignment"] = pa.struct(dict.fromkeys(("line", "place", "units"), text))
    if trees:
        schema |= zip(COLUMNS, map(pa.list_, (text, pa.int32(), text)), strict=True)
    if any(map(language_ids, tokenizers)):
        schema |= {"source_lang": text, "target_lang": text}
    with ArrowWriter(path=path, schema=pa.schema(schema)) as writer:
        for corpus in corpora:
            languages = corpus.language_columns(source_lang, target_lang, tokenizers)
            for pair in corpus.rows(source_lang, target_lang, on_empty):
                writer.write(row_of_pair(pair, has_links, trees) | languages)
        writer.finalize()
    return Dataset.from_file(path)


def row_of_pair(pair: Sequence[Sentence], has_links: bool, has_trees: bool) -> dict[str, Any]:
    """Return a pair as a row of a dataset, with its links and the tree of its source if there are columns for them."""
    source, target = pair
    row: dict[str, Any] = {"source": source.text, "target": target.text}
    if has_links:
        row["alignment"] = None if target.links is None else asdict(target.links)
    return row | columns_of_tree(source.tree) if has_trees else row


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
        state: Any = [type(tokenizer).__name__, tokenizer.get_vocab(), ids]
    else:
        state = json.loads(content)
        state.pop("padding", None)
        state.pop("truncation", None)
        if ids[0] != ids[1]:
            state["target_controls"] = ids[1]
    return digest_of(state)
