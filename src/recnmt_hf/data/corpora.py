"""From named corpora to tokenized datasets, cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .._plain_text import encode_plain, is_blank, truncated
from .._values import Range, check_options, check_value, documented, kind_of, option, parse
from ..models.user_errors import MissingFileError, UserError
from .files import partial_folder
from .generated import Pair, generate_corpus
from .text import SentencePair, check_empty_choice, open_text, read_jsonl, read_lcsts, read_parallel, read_tsv


logger = logging.get_logger(__name__)

# Part of the name of prepared data; another one for another way of tokenizing.
PREPARATION = 2
# Lies in a folder of prepared data and says what else does.
CONTENTS = "contents.json"
# Above this share of unknown tokens there is a warning.
UNKNOWN_SHARE = 0.01
# A generated corpus beyond this size is a slip of the keyboard.
MOST_SENTENCES = 10**7
# Ways to handle pairs that are too long.
ON_LONG = ("skip", "truncate")
GENERATED_SPLITS = ("train", "validation", "test", "test_deep")


@documented
@dataclass(frozen=True)
class Corpus:
    """
    Where sentence pairs come from; exactly one of `source` with `target`, `tsv`, `jsonl`, `lcsts`, `dataset`,
    `generated`. The target of a summary's text is the summary.
    """

    source: str | None = option(None, "source side of line-aligned text files, plain or gzipped")
    target: str | None = option(None, "target side of them")
    tsv: str | None = option(None, "a file of tab-separated pairs")
    jsonl: str | None = option(None, "a file of JSON lines")
    lcsts: str | None = option(None, "a part of LCSTS, short Chinese texts and their summaries, in its own format")
    min_score: Annotated[int | None, Range(least=1, most=5)] = option(
        None, "summaries of LCSTS with a lower human label are left out; the papers use 3"
    )
    dataset: str | None = option(
        None, "a set of pairs for `datasets.load_dataset`: a name on the Hub, or a local folder"
    )
    config: str | None = option(None, 'its configuration, e.g. "de-en"')
    split: str = option("train", 'its split; slices as in "train[:1000]" are allowed')
    revision: str | None = option(None, "its revision on the Hub")
    source_column: str | None = option(
        None, "its column of source sentences, where it has no `translation` feature; of jsonl: the key"
    )
    target_column: str | None = option(None, "its column of target sentences")
    generated: str | None = option(
        None, f"a split of the generated English-German corpus: {', '.join(GENERATED_SPLITS)}"
    )
    size: Annotated[int | None, Range(least=1, most=MOST_SENTENCES)] = option(None, "sentences of the generated split")
    seed: int = option(1, "seed of the generated corpus")

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        check_options(self)
        kinds = [name for name in ("source", "tsv", "jsonl", "lcsts", "dataset", "generated") if getattr(self, name)]
        if len(kinds) != 1:
            raise UserError(
                "A corpus needs exactly one of source (with target), tsv, jsonl, lcsts, dataset and generated, but "
                f"this one has {', '.join(kinds) or 'none'}. Remedy: split it into several list entries, or name its "
                "files."
            )
        if (self.source is None) != (self.target is None):
            raise UserError("A corpus of text files needs both source and target. Remedy: name the missing file.")
        if self.min_score is not None and self.lcsts is None:
            raise UserError(
                f"min_score={self.min_score} is for lcsts, and this corpus is another one. Remedy: leave it out."
            )
        if self.generated is not None and self.generated not in GENERATED_SPLITS:
            raise UserError(
                f"The generated corpus has no split {self.generated!r}. Remedy: choose one of "
                f"{', '.join(GENERATED_SPLITS)}."
            )

    def pairs(self, source_lang: str, target_lang: str, on_empty: str = "error") -> Iterator[SentencePair]:
        """Yield the checked sentence pairs; see [`read_parallel`] for the errors."""
        check_empty_choice(on_empty)
        self.check_languages(source_lang, target_lang)
        if self.dataset:
            return self._from_datasets(source_lang, target_lang, on_empty)
        if self.generated:
            return self._generated(self.generated, source_lang, target_lang)
        if self.tsv:
            return read_tsv(self.tsv, on_empty)
        if self.jsonl:
            left, right = self.source_column or source_lang, self.target_column or target_lang
            return read_jsonl(self.jsonl, left, right, on_empty)
        if self.lcsts:
            return read_lcsts(self.lcsts, self.min_score, on_empty)
        assert self.source is not None and self.target is not None, "a corpus has one kind of source"
        return read_parallel(self.source, self.target, on_empty)

    def check_languages(self, source_lang: str, target_lang: str) -> None:
        """Raise `UserError` if the corpus is known not to have the languages, without reading it."""
        if self.generated and {source_lang, target_lang} != {"en", "de"}:
            raise UserError(
                f"The generated corpus is English-German; {source_lang}-{target_lang} was asked for. Remedy: set "
                "source_lang and target_lang to en and de (in either order), or name another corpus."
            )
        named = self.source_column is not None and self.target_column is not None
        if (self.jsonl or self.dataset) and source_lang == target_lang and not named:
            raise UserError(
                f"source_lang and target_lang are both {source_lang}, and {self.jsonl or self.dataset} would be its "
                "own target. Remedy: name source_column and target_column."
            )

    def local_files(self) -> list[str]:
        """Return the local files that the corpus names."""
        return [path for path in (self.source, self.target, self.tsv, self.jsonl, self.lcsts) if path]

    def _generated(self, split: str, source_lang: str, target_lang: str) -> Iterator[SentencePair]:
        if self.size is None:
            splits = whole_corpus(self.seed)
        else:
            splits = generate_corpus(seed=self.seed, **{split: self.size})
        for pair in splits[split]:
            yield SentencePair(getattr(pair, source_lang), getattr(pair, target_lang))

    def _from_datasets(self, source_lang: str, target_lang: str, on_empty: str) -> Iterator[SentencePair]:
        try:
            data = load_dataset(self.dataset, self.config, split=self.split, revision=self.revision)
        except Exception as error:  # datasets raises many kinds; the user needs one sentence
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"The dataset {self.dataset!r} (config {self.config!r}, split {self.split!r}) could not be loaded: "
                f"{first}. Remedy: check name, config and split, and the connection to the Hub."
            ) from error
        left, right = self.source_column, self.target_column
        nested = left is None and "translation" in data.column_names
        left, right = left or source_lang, right or target_lang
        names = (
            list(data.features["translation"])
            if nested and isinstance(data.features["translation"], dict)
            else (getattr(data.features["translation"], "languages", [left, right]) if nested else data.column_names)
        )
        for name in (left, right):
            if name not in names:
                raise UserError(
                    f"The dataset {self.dataset!r} has no {name!r}, only {', '.join(map(str, names))}. Remedy: correct "
                    "source_lang and target_lang, or name source_column and target_column."
                )
        for number, row in enumerate(data):
            record = row["translation"] if nested else row
            sides = [(record or {}).get(name) for name in (left, right)]
            for name, text in zip((left, right), sides, strict=True):
                if text is not None and not isinstance(text, str):
                    raise UserError(
                        f"The dataset {self.dataset!r}, split {self.split!r}, row {number}: {name!r} is no text but "
                        f"{str(text)[:60]!r}. Remedy: name the columns that hold sentences as source_column and "
                        "target_column."
                    )
            pair = SentencePair(*((text or "").strip() for text in sides))
            if not any(map(is_blank, pair)):
                yield pair
            elif on_empty == "error":
                raise UserError(
                    f"The dataset {self.dataset!r}, split {self.split!r}, row {number}: an empty sentence. Remedy: set "
                    "on_empty: skip to leave such pairs out."
                )

    def check_files(self) -> None:
        """
        Check that the corpus' files can be opened and are not empty, without reading them.

        Raises:
            FileNotFoundError: A file or folder does not exist.
            UserError: A file cannot be read, is a folder, or is empty.
        """
        for path in self.local_files():
            check_file(path)
        if self.dataset and self.dataset.startswith(("/", "./", "../", "~")) and not Path(self.dataset).exists():
            raise MissingFileError(f"There is no folder {self.dataset}. Remedy: correct the path.")

    def fingerprint(self) -> list[Any]:
        """Return what identifies the content: fields, and the bytes of local files."""
        files = self.local_files()
        if self.dataset and Path(self.dataset).is_dir():
            files += [str(path) for path in sorted(Path(self.dataset).rglob("*")) if path.is_file()]
        return [
            {field.name: getattr(self, field.name) for field in fields(self)},
            [digest_of_file(path) for path in files if Path(path).is_file()],
        ]


# One corpus or several, as public functions take them.
Corpora = Corpus | Mapping[str, Any] | Sequence[Corpus | Mapping[str, Any]]


@lru_cache(maxsize=1)
def whole_corpus(seed: int) -> dict[str, list[Pair]]:
    """The generated corpus in its usual sizes, made once for the several splits and passes of a run."""
    return generate_corpus(seed=seed)


def digest_of_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: str) -> None:
    """Raise `UserError` for a file that cannot be read, is a folder, or is empty."""
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder. Remedy: name a file in it.")
    try:
        with open_text(path) as file:
            if not file.buffer.read(1):
                raise UserError(f"{path} is empty. Remedy: give a file with at least one sentence.")
    except (OSError, EOFError) as error:
        if isinstance(error, UserError):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be read ({why}). Remedy: correct the path or its permissions.") from None


def parse_corpora(corpora: Corpora, place: str = "corpora") -> list[Corpus]:
    """
    Return corpora as a list of [`Corpus`]. They may be given as one corpus or several, as objects or mappings.

    Args:
        corpora: The corpora.
        place (`str`, *optional*, defaults to `"corpora"`): Their name in messages, e.g. `"data.train"`.

    Raises:
        UserError: A mapping has an unknown field, a value of the wrong type, or not exactly one kind of source.
    """
    if isinstance(corpora, Corpus):
        return [corpora]
    if isinstance(corpora, Mapping):
        return [parse(Corpus, corpora, place)]
    if not isinstance(corpora, (list, tuple)) or not corpora:
        kind = "an empty list" if isinstance(corpora, (list, tuple)) else kind_of(corpora)
        raise UserError(
            f"{place} must be a list of corpora, not {kind}. Remedy: write e.g. [{{source: a.en, target: a.de}}] or "
            "[{generated: train}]."
        )
    return [
        corpus if isinstance(corpus, Corpus) else parse(Corpus, corpus, f"{place}[{number}]")
        for number, corpus in enumerate(corpora)
    ]


def load_pairs(
    corpora: Corpora,
    source_lang: str,
    target_lang: str,
    on_empty: str = "error",
) -> Iterator[SentencePair]:
    """
    Yield the pairs of one corpus, or of several one after the other.

    Raises:
        ValueError, FileNotFoundError: Something is wrong with a corpus; the message names file and line.
    """
    yield from pairs_of(parse_corpora(corpora), source_lang, target_lang, on_empty)


def pairs_of(
    corpora: Sequence[Corpus], source_lang: str, target_lang: str, on_empty: str = "error"
) -> Iterator[SentencePair]:
    """Yield the pairs of several corpora one after the other, as [`load_pairs`]."""
    for corpus in corpora:
        yield from corpus.pairs(source_lang, target_lang, on_empty)


def tokenize_pairs(
    batch: Mapping[str, list[str]],
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    most: tuple[int, int] | None = None,
) -> dict[str, list[Any]]:
    """
    Token ids and lengths of a batch of `source` and `target` sentences; `</s>` and the like in them are text. Those of
    more than `most` tokens are cut off.
    """
    sources = encode_plain(source_tokenizer, batch["source"])["input_ids"]
    targets = encode_plain(target_tokenizer, batch["target"], is_target=True)["input_ids"]
    if most is not None:
        sources = [truncated(ids, most[0], {source_tokenizer.eos_token_id}) for ids in sources]
        targets = [truncated(ids, most[1], {target_tokenizer.eos_token_id}) for ids in targets]
    return {
        "input_ids": sources,
        "labels": targets,
        "source_length": [len(ids) for ids in sources],
        "target_length": [len(ids) for ids in targets],
    }


def keep_lengths(
    source_lengths: list[int], target_lengths: list[int], max_source: int, max_target: int, max_ratio: float | None
) -> list[bool]:
    """Which pairs pass the length filters."""
    return [
        source <= max_source
        and target <= max_target
        and (max_ratio is None or max(source, target) <= max_ratio * min(source, target))
        for source, target in zip(source_lengths, target_lengths, strict=True)
    ]


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
) -> Dataset:
    """
    A tokenized dataset, made once and then read from `cache_dir`.

    Args:
        corpora: One corpus or a list of them.
        source_lang, target_lang (`str`): Language codes.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`): May be the same one.
        cache_dir (`str` or `Path`): The prepared data stands there under a name made from content and settings.
        max_source_length, max_target_length (`int`): Pairs with more tokens, end token included, are left out, or cut
            off to so many.
        max_length_ratio (`float`, *optional*): Pairs whose lengths differ by more than this factor are left out.
        on_empty (`str`): `"error"` or `"skip"`.
        num_proc (`int`, *optional*): Processes that tokenize.
        keep_text (`bool`): Keeps the columns `source` and `target`, whole.
        on_long (`str`): `"skip"` or `"truncate"`: what happens to those.

    Returns:
        `datasets.Dataset` with `input_ids`, `labels`, `source_length`, `target_length` (and the text).

    Raises:
        ValueError: No pair is left, a setting is not allowed, or something is wrong with a corpus.
    """
    corpora = parse_corpora(corpora)
    check_value("max_source_length", max_source_length, int, Range(least=1))
    check_value("max_target_length", max_target_length, int, Range(least=1))
    check_value("max_length_ratio", max_length_ratio, float | None, Range(least=1))
    check_value("num_proc", num_proc, int | None, Range(least=1))
    check_empty_choice(on_empty)
    check_value("on_long", on_long, Literal[ON_LONG])
    settings = [
        PREPARATION,
        [corpus.fingerprint() for corpus in corpora],
        [source_lang, target_lang, max_source_length, max_target_length, max_length_ratio, on_empty, keep_text],
        [tokenizer_fingerprint(tokenizer) for tokenizer in (source_tokenizer, target_tokenizer)],
        *([] if on_long == "skip" else [on_long]),
    ]
    key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:24]
    folder = Path(cache_dir) / key
    if (found := load_prepared(folder)) is not None:
        return found
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    with partial_folder(Path(cache_dir)) as working:
        data = collect(corpora, source_lang, target_lang, on_empty, working)
        total = len(data)
        if num_proc is not None:
            num_proc = max(1, min(num_proc, total // 1000))
        try:
            data = data.map(
                tokenize_pairs,
                batched=True,
                fn_kwargs={
                    "source_tokenizer": source_tokenizer,
                    "target_tokenizer": target_tokenizer,
                    "most": (max_source_length, max_target_length) if on_long == "truncate" else None,
                },
                num_proc=num_proc if num_proc and num_proc > 1 else None,
                remove_columns=None if keep_text else ["source", "target"],
                desc=f"Tokenizing {total} pairs",
                new_fingerprint=f"{key}-tokenized",
                cache_file_name=str(working / "tokenized.arrow"),
            )
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            raise UserError(
                f"One of {num_proc} processes that tokenize was killed, perhaps for want of memory. Remedy: set a "
                "smaller num_proc, or leave it out."
            ) from error
        for side, column, tokenizer in (
            ("source", "input_ids", source_tokenizer),
            ("target", "labels", target_tokenizer),
        ):
            warn_of_unknown(data, side, column, tokenizer)
        kept = keep_lengths(
            data["source_length"][:],
            data["target_length"][:],
            max_source_length,
            max_target_length,
            max_length_ratio,
        )
        if not any(kept):
            raise UserError(
                f"None of {total} sentence pairs is left after the length filters (at most {max_source_length} source "
                f"and {max_target_length} target tokens). Remedy: allow longer sentences, or check the corpus."
            )
        if not all(kept):
            data = data.select([i for i, keep in enumerate(kept) if keep])
        done = working / "done"
        data.save_to_disk(str(done))
        (done / CONTENTS).write_text(json.dumps(contents_of(done)), encoding="utf-8")
        if folder.exists():  # damaged; whatever reads it at this moment keeps its open files
            os.replace(folder, working / "damaged")
        try:
            os.replace(done, folder)
        except OSError:  # another process finished the same work first
            if not folder.is_dir():
                raise
    return load_from_disk(str(folder))


def contents_of(folder: Path) -> dict[str, list[int]]:
    """Size and checksum of each file of prepared data."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name == CONTENTS or not path.is_file():
            continue
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                checksum = zlib.crc32(block, checksum)
        found[path.name] = [path.stat().st_size, checksum]
    return found


def load_prepared(folder: Path) -> Dataset | None:
    """Prepared data, or `None` where there is none or where it is damaged, so that it must be prepared again."""
    if not folder.is_dir():
        return None
    try:
        written = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        if written == contents_of(folder):
            return load_from_disk(str(folder))
    except (OSError, ValueError):
        pass
    logger.warning(f"The prepared data in {folder} is damaged and made anew.")
    return None


def warn_of_unknown(data: Dataset, side: str, column: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Says how many tokens the tokenizer does not know, where that is more than a few."""
    if tokenizer.unk_token_id is None:
        return
    unknown = total = 0
    for chunk in data.data.column(column).chunks:
        ids = pc.list_flatten(chunk)
        total += len(ids)
        unknown += pc.sum(pc.equal(ids, tokenizer.unk_token_id)).as_py() or 0
    if unknown > UNKNOWN_SHARE * total:
        logger.warning(
            f"{100 * unknown / total:.1f}% of the {side} tokens are unknown to the {side} tokenizer. Remedy: a larger "
            "vocabulary, or BPE, which writes what it does not know in bytes."
        )


def collect(corpora: Sequence[Corpus], source_lang: str, target_lang: str, on_empty: str, working: Path) -> Dataset:
    """The checked sentence pairs as a dataset with the columns `source` and `target`."""
    from datasets.arrow_writer import ArrowWriter

    path = working / "pairs.arrow"
    schema = pa.schema({"source": pa.string(), "target": pa.string()})
    writer = ArrowWriter(path=str(path), schema=schema)
    count = 0
    for pair in pairs_of(corpora, source_lang, target_lang, on_empty):
        writer.write({"source": pair.source, "target": pair.target})
        count += 1
    writer.finalize()
    writer.close()
    if not count:
        raise UserError("The corpus holds no sentence pair. Remedy: name files that do, or check on_empty.")
    return Dataset.from_file(str(path))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for tokenizers that cut text alike, however they were used before."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        # Neither vocabulary nor settings can be read off in one way: what it makes of a text shows the settings.
        probe = "A b-c, 1.5 Ä 你好 </s>"
        state = [
            type(tokenizer).__name__,
            tokenizer.get_vocab(),
            [encode_plain(tokenizer, probe, is_target)["input_ids"] for is_target in (False, True)],
        ]
    else:
        state = json.loads(backend.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
