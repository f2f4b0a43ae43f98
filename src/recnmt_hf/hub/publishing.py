"""Prepare a trained model as a repository of the Hub, and upload it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils import get_token

from .._loading_errors import shorten
from .._plain_card import CARD
from ..data.files import open_output_folder
from ..data.tree_inputs import RELATIONS_FILE
from ..errors import UserError
from ..models.user_errors import remember_secrets
from ..training.checkpoints import RECIPE
from ..training.evidence import EVIDENCE, TRANSLATIONS, Evidence, differences, without_private
from ..training.processes import logger
from ..training.recipe import Recipe
from ..training.recipe_yaml import dump_yaml
from .card import card_of_copy
from .checked_copy import SHARD, model_folder, write_checked_copy


# Files that a repository may contain. Nothing else is ever uploaded.
ALLOWED = (
    *(CARD, "config.json", "generation_config.json", "*.py", RECIPE, EVIDENCE, RELATIONS_FILE, f"{TRANSLATIONS}/*"),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "vocab.json", "target_vocab.json", "source.spm", "target.spm"),
    *("sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "merges.txt", "vocab.txt"),
    *(f"target_tokenizer/*.{ending}" for ending in ("json", "spm", "model", "txt")),
)
# Files of an earlier upload that are deleted if the folder no longer has them.
REPLACED = (
    *("model*.safetensors", "model.safetensors.index.json", f"{TRANSLATIONS}/*", "target_tokenizer/*"),
    RELATIONS_FILE,
)
# The models of a Space, by which it is recognized, and its files besides their folders.
SPACE, MODELS = "recnmt_space.json", "models"
SPACE_FILES = (CARD, "app.py", "requirements.txt", SPACE)
# Access tokens of the Hub, and escapes of JSON, YAML, Python and Markdown before or within one.
TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_(?:[a-z]+_)?[A-Za-z0-9]{20,}")
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[abfnrtv0]|(.))", re.DOTALL)


@dataclass(frozen=True)
class Destination:
    """Target of an upload."""

    name: str  # `user/name`, or `name` for a repository of the user
    kind: Literal["model", "space"] = "model"
    private: bool | None = None  # visibility of a new repository; by default that of the owner's settings
    branch: str | None = None  # created if it does not exist; by default `main`
    pull_request: bool = False  # instead of a commit
    message: str | None = None
    tag: str | None = None
    collection: str | None = None  # slug of a collection to add the model to
    token: str | None = field(default=None, repr=False)  # access token; by default the stored one


def prepare_repository(source: str | Path, output: str | Path, name: str, shard: str = SHARD, **card: Any) -> Path:
    """
    Write the contents of a repository into a folder: weights, configuration, code, tokenizers, card, recipe, evidence,
    translations. The model is loaded and checked first, and the code of the card is run.

    Args:
        source (`str` or `Path`): Folder of a model or a run.
        output (`str` or `Path`): A new folder, which is returned.
        name (`str`): Name of the repository.
        shard (`str`, *optional*): Largest file of weights.
        **card: `license`, `sentence`, `notes` and `template` as for [`~recnmt_hf.hub.card.write_card`].

    Returns:
        `Path`: The folder of the repository.

    Raises:
        UserError: The model is incomplete or does not match its tokenizers; the code of the card fails; a text contains
            an access token.
        FileExistsError: The output exists and is not empty.
    """
    folder = model_folder(source)
    check_links(folder)
    evidence = Evidence.load(folder)

    def set_generation(model: Any) -> None:
        """
        Set the beams and the exponent of the length penalty of the model's tests for `model.generate`, which divides by
        the length itself, and a limit of 256 tokens if training set none.
        """
        config = model.generation_config
        decoding = evidence.tests[0].decoding if evidence.tests else {}
        config.num_beams = decoding.get("beams", config.num_beams)
        if decoding and (config.num_beams or 1) > 1:
            config.length_penalty = float(decoding.get("length_penalty", 1.0))
        if config.max_length is None and config.max_new_tokens is None:
            config.max_length = 256

    with open_output_folder(output, must_be_new=True) as working:
        write_checked_copy(folder, working, set_generation, shard)
        (working / CARD).write_text(card_of_copy(working, evidence, name, **card).content, encoding="utf-8")
        if (folder / EVIDENCE).is_file():
            evidence.save(working)
        for name_of_file in (test.translations for test in evidence.tests):
            if Path(name_of_file).parent != Path(TRANSLATIONS):  # it would lead to any file of this machine
                raise UserError(f"{name_of_file} of evidence.json is not a file of translations.", field=name_of_file)
            (working / TRANSLATIONS).mkdir(exist_ok=True)
            shutil.copyfile(folder / name_of_file, working / name_of_file)
        if (recipe := recipe_of(folder, evidence)) is not None:
            (working / RECIPE).write_text(recipe, encoding="utf-8")
        check_contents(working)
    return Path(output)


def check_links(folder: Path) -> None:
    """
    Raise `UserError` for a symbolic link, which may lead to any file of this machine. A snapshot in the Hub's cache
    consists of links to the cache's blobs; these are allowed.
    """
    blobs = Path(os.path.realpath(folder)).parent.parent / "blobs"
    for path in (path for pattern in ("*", "*/*") for path in sorted(folder.glob(pattern))):
        if path.is_symlink() and Path(os.path.realpath(path)).parent != blobs:
            raise UserError(f"{path} is a symbolic link, which is not published.", field=path)


def recipe_of(folder: Path, evidence: Evidence) -> str | None:
    """
    Return the recipe that a model was trained with, without private values. The model's evidence must record how it
    differs from the defaults: a recipe without this proof may belong to another model and is not published.
    """
    for place in (folder / RECIPE, folder.parent / RECIPE):
        if place.is_file() and not place.is_symlink():
            try:
                recipe = Recipe.from_file(place)
                if without_private(differences(recipe.to_dict())) == evidence.recipe:
                    return dump_yaml(without_private(recipe.to_dict()))
                reason = f"{EVIDENCE} of the model does not record it"
            except UserError as error:
                reason = f"it is not a valid recipe: {shorten(str(error))}"
            logger.warning(f"{place} is not published ({reason}).")
    return None


def files_of(folder: Path) -> list[tuple[str, int]]:
    """Return names and sizes of the files of a prepared repository."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [(path.relative_to(folder).as_posix(), path.lstat().st_size) for path in paths]


def is_allowed(name: str, kind: str = "model") -> bool:
    """Return whether a repository may contain a file of this name."""
    if kind == "space":
        first, _, rest = name.partition("/")
        return is_allowed(rest.partition("/")[2]) if first == MODELS else name in SPACE_FILES
    # A star of fnmatch also matches slashes, so their numbers are compared.
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in ALLOWED)


def check_contents(folder: Path, kind: str = "model") -> None:
    """Raise `UserError` if a file is not allowed in a repository, is a link, or contains an access token."""
    for name, _ in files_of(folder):
        path = folder / name
        if path.is_symlink() or not is_allowed(name, kind):
            raise UserError(f"{name} is a symbolic link, or not a file that a repository may contain.", field=name)
        if path.suffix != ".safetensors" and contains_token(path.read_bytes()):
            raise UserError(f"{name} seems to contain an access token of the Hub.", field=name)


def contains_token(content: bytes) -> bool:
    """Return whether a text contains an access token of the Hub, also behind one or several levels of escapes."""

    def character(escape: re.Match[str]) -> str:
        code, plain = escape[1] or escape[2], escape[3]
        return chr(int(code, 16)) if code else plain or " "

    text, escaped = content.decode("utf-8", "replace"), ""
    while text != escaped:
        if TOKEN.search(text):
            return True
        text, escaped = ESCAPE.sub(character, text), text
    return False


def upload(folder: str | Path, to: Destination) -> str:
    """
    Upload the output of [`prepare_repository`] or [`~recnmt_hf.hub.spaces.prepare_space`] in one commit, and return the
    address of the commit or pull request. Unchanged files are not sent again.

    Raises:
        UserError: The folder contains a file that may not be published, the Hub rejects the card or the upload, or a
            Space of this name has other files.
    """
    folder = Path(folder)
    check_contents(folder, to.kind)
    api = HfApi(token=to.token)
    kind: dict[str, Any] = {"repo_type": to.kind}
    with explained_requests(to.name, to.token):
        sdk = "gradio" if to.kind == "space" else None
        created = api.create_repo(to.name, private=to.private, exist_ok=True, repo_type=to.kind, space_sdk=sdk)
        name = str(created.repo_id)
        if to.branch is not None:
            api.create_branch(name, branch=to.branch, exist_ok=True, **kind)
        present = api.list_repo_files(name, revision=to.branch, **kind)
        replaced: tuple[str, ...] = REPLACED
        if to.kind == "space":
            package = "recnmt_hf/"  # a copy of this package, in Spaces of earlier versions
            if {SPACE, f"{package}__init__.py"}.isdisjoint(present) and not set(present) <= {CARD, ".gitattributes"}:
                raise UserError(f"The Space {name} has files that recnmt publish did not write.", field=name)
            replaced = (f"{package}*", f"{MODELS}/*")
        own = [file for file, _ in files_of(folder)]
        left = [file for file in present if file not in own and any(fnmatch(file, one) for one in replaced)]
        # Unchanged files are skipped, and the card is validated. `upload_folder` may make several commits.
        commit = api.create_commit(
            name,
            [
                *(CommitOperationAdd(path_in_repo=file, path_or_fileobj=folder / file) for file in own),
                *(CommitOperationDelete(path_in_repo=file) for file in left),
            ],
            revision=to.branch,
            commit_message=to.message or f"Upload {name.rpartition('/')[2]}",
            create_pr=to.pull_request,
            **kind,
        )
        if to.tag is not None:
            api.create_tag(name, tag=to.tag, revision=commit.oid, exist_ok=False, **kind)
        if to.collection is not None:
            api.add_collection_item(to.collection, item_id=name, item_type=to.kind, exists_ok=True)
    return commit.pr_url or commit.commit_url


@contextmanager
def explained_requests(name: str, token: str | None) -> Iterator[None]:
    """Turn errors of the Hub and of the connection into a [`UserError`], with the token masked."""
    remember_secrets(f"?token={token or get_token()}")
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the Hub's client, and of the HTTP library that its release uses
        reason = shorten(str(error))
        raise UserError(f"{name}: {ENDPOINT} refuses or cannot be reached: {reason}.", field=name) from error


def listing(files: Sequence[tuple[str, int]]) -> str:
    """Return the names and sizes line by line, and their sum."""
    rows = [*files, (f"{len(files)} files", sum(size for _, size in files))]
    width = max(len(name) for name, _ in files)
    return "\n".join(f"{name:<{width}}  {size:>13,}" for name, size in rows)
