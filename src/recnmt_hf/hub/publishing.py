"""A trained model as a repository of the Hub: what belongs there, and nothing else."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from .._loading_errors import shorten
from ..data.files import open_output_folder
from ..models.seq2seq_card import CARD
from ..models.user_errors import MissingFileError, UserError
from ..training.evidence import EVIDENCE, TRANSLATIONS, Evidence, differences, public
from ..training.processes import say
from ..training.recipe import Recipe
from ..training.recipe_yaml import dump_yaml
from ..training.resuming import RECIPE
from .card import card_of_copy
from .checked_copy import SHARD, model_folder, write_checked_copy


# What a repository may hold. Nothing else is ever uploaded, whatever lies in a folder.
ALLOWED = (
    CARD,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "vocab.json",
    "target_vocab.json",
    "source.spm",
    "target.spm",
    "target_tokenizer/*.json",
    "target_tokenizer/*.spm",
    "*.py",
    RECIPE,
    EVIDENCE,
    f"{TRANSLATIONS}/*",
)
# What an earlier upload may have left that is no longer there.
REPLACED = ("model*.safetensors", "model.safetensors.index.json", f"{TRANSLATIONS}/*", "target_tokenizer/*")
# An access token of the Hub, and the escapes of JSON, YAML, Python and Markdown that may stand before or in one.
TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_(?:[a-z]+_)?[A-Za-z0-9]{20,}")
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[abfnrtv0]|(.))", re.DOTALL)


@dataclass(frozen=True)
class Destination:
    """
    Where a model goes.

    Attributes:
        name (`str`): `user/name`, or `name` for the user's own.
        private (`bool`, *optional*): Of a new repository; `None`: as its owner has it.
        branch (`str`, *optional*): Made where it is not there; by default `main`.
        pull_request (`bool`): Proposes the upload.
        message (`str`, *optional*): Of the commit.
        tag (`str`, *optional*): Marks the commit.
        collection (`str`, *optional*): Slug of a collection that the model joins.
        token (`str`, *optional*): By default the one that is stored.
    """

    name: str
    private: bool | None = None
    branch: str | None = None
    pull_request: bool = False
    message: str | None = None
    tag: str | None = None
    collection: str | None = None
    token: str | None = field(default=None, repr=False)


def prepare_repository(
    source: str | Path,
    output: str | Path,
    name: str,
    license: str | None = None,
    sentence: str | None = None,
    notes: str | None = None,
    shard: str = SHARD,
) -> Path:
    """
    Writes a folder with what a repository holds: weights, configuration, code, tokenizers, card, recipe, evidence,
    translations. The model is loaded and checked first, and the card's code is run.

    Args:
        source (`str` or `Path`): A model's folder, or a run's.
        output (`str` or `Path`): A new folder.
        name (`str`): The repository's.
        license, sentence, notes: As for [`~recnmt_hf.hub.card.card_of`].
        shard (`str`, *optional*): Largest file of weights.

    Returns:
        The folder.

    Raises:
        ValueError: The model is not whole, or its tokenizers are not its own; the card's code fails; a text holds an
            access token.
        FileExistsError: The output is there and not empty.
    """
    folder = model_folder(source)
    check_links(folder)
    evidence = Evidence.load(folder)
    with open_output_folder(output, must_be_new=True) as working:
        write_checked_copy(folder, working, lambda model: set_generation(model, evidence), shard)
        card = card_of_copy(working, evidence, name, license, sentence, notes)
        (working / CARD).write_text(card.content, encoding="utf-8")
        if (folder / EVIDENCE).is_file():
            evidence.save(working)
        for test in evidence.tests:
            copy_translations(folder, working, test.translations)
        if (recipe := recipe_of(folder, evidence)) is not None:
            (working / RECIPE).write_text(recipe, encoding="utf-8")
        check_contents(working)
    return Path(output)


def set_generation(model: Any, evidence: Evidence) -> None:
    """
    Set what `model.generate` does by default: the beams and the length penalty of the model's tests, and a limit of
    256 tokens where training set none.
    """
    config = model.generation_config
    if evidence.tests:
        decoding = evidence.tests[0].decoding
        config.num_beams = decoding.get("beams", config.num_beams)
        if (config.num_beams or 1) > 1:
            config.length_penalty = float(decoding.get("length_penalty", 1.0))
    if config.max_length is None and config.max_new_tokens is None:
        config.max_length = 256


def copy_translations(folder: Path, working: Path, name: str) -> None:
    """Copy one file of translations, which must lie in the folder for them."""
    if Path(name).parent != Path(TRANSLATIONS) or not (folder / name).is_file():
        raise MissingFileError(
            f"{folder / name}, which {EVIDENCE} names, is no file of the folder {TRANSLATIONS}. Remedy: test the model "
            "again."
        )
    (working / TRANSLATIONS).mkdir(exist_ok=True)
    shutil.copyfile(folder / name, working / name)


def check_links(folder: Path) -> None:
    """
    Refuse symbolic links, which may lead to any file of this machine. A snapshot in the Hub's cache consists of links
    to the cache's blobs; these are allowed.

    Raises:
        UserError: A file or subfolder is a link to another place.
    """
    blobs = Path(os.path.realpath(folder)).parent.parent / "blobs"
    for path in (path for pattern in ("*", "*/*") for path in sorted(folder.glob(pattern))):
        if path.is_symlink() and Path(os.path.realpath(path)).parent != blobs:
            raise UserError(f"{path} is a symbolic link. Remedy: replace it with the file: only files are published.")


def recipe_of(folder: Path, evidence: Evidence) -> str | None:
    """
    Return the recipe that a model was trained with, without private values. The model's evidence must record how it
    differs from the defaults: a recipe without this proof may belong to another model and is not published.
    """
    for place in (folder / RECIPE, folder.parent / RECIPE):
        if place.is_file() and not place.is_symlink():
            try:
                recipe = Recipe.from_file(place)
                if public(differences(recipe)) == evidence.recipe:
                    return dump_yaml(public(recipe.to_dict()))
                reason = f"{EVIDENCE} of the model does not record it"
            except UserError as error:
                reason = f"it is no recipe: {shorten(str(error))}"
            say(f"{place} is not published ({reason}).")
    return None


def files_of(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of a prepared repository's files."""
    found = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in found]


def is_allowed(name: str) -> bool:
    # fnmatch's star crosses slashes; what lies in a subfolder is allowed by patterns with one.
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in ALLOWED)


def check_contents(folder: Path) -> None:
    """
    Whether a folder holds what may be published, and nothing else.

    Raises:
        UserError: A file has no place there, leads out of the folder, or holds an access token.
    """
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise UserError(f"{name} is a link. Remedy: publish files.")
        if path.is_dir():
            continue
        if not is_allowed(name):
            raise UserError(f"{name} has no place in a repository. Remedy: remove it.")
        if path.suffix != ".safetensors" and holds_token(path.read_bytes()):
            raise UserError(
                f"{name} holds what looks like an access token of the Hub. Remedy: remove it there, and revoke it at "
                "huggingface.co/settings/tokens if anybody may have seen it."
            )


def holds_token(content: bytes) -> bool:
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
    Uploads a prepared repository; files that the Hub has already are not sent again.

    Args:
        folder (`str` or `Path`): As [`prepare_repository`] writes it.
        to ([`Destination`]): Where it goes.

    Returns:
        The address of the commit, or of the pull request.

    Raises:
        UserError: The folder holds what may not be published, or the Hub refuses.
    """
    folder = Path(folder)
    check_contents(folder)
    api = HfApi(token=to.token)
    with explained_upload(to.name):
        check_card(api, folder)
        name = str(api.create_repo(to.name, private=to.private, exist_ok=True).repo_id)
        if to.branch is not None:
            api.create_branch(name, branch=to.branch, exist_ok=True)
        changed, gone = difference(api, name, to.branch, folder)
        if changed or gone:
            commit = api.create_commit(
                name,
                [
                    *(CommitOperationAdd(path_in_repo=each, path_or_fileobj=str(folder / each)) for each in changed),
                    *(CommitOperationDelete(path_in_repo=each) for each in gone),
                ],
                revision=to.branch,
                commit_message=to.message or f"Upload {name.rpartition('/')[2]}",
                create_pr=to.pull_request,
            )
            sha, address = commit.oid, commit.pr_url or commit.commit_url
        else:
            sha = str(api.model_info(name, revision=to.branch).sha)
            address = f"{api.endpoint}/{name}/commit/{sha}"
        if to.tag is not None:
            api.create_tag(name, tag=to.tag, revision=sha, exist_ok=False)
        if to.collection is not None:
            api.add_collection_item(to.collection, item_id=name, item_type="model", exists_ok=True)
    return address


def check_card(api: HfApi, folder: Path) -> None:
    """Asks the Hub whether it takes the card, of whose licence, languages and scores it allows certain forms alone."""
    content = (folder / CARD).read_text(encoding="utf-8")
    answer = get_session().post(
        f"{api.endpoint}/api/validate-yaml",
        json={"content": content, "repoType": "model"},
        headers=build_hf_headers(token=api.token),
    )
    if answer.status_code == 400:
        reason = "; ".join(each["message"] for each in answer.json().get("errors", []))
        raise UserError(
            f"The Hub does not take this card ({shorten(reason)}). Nothing was uploaded. Remedy: correct what it "
            "names; of a licence it wants the identifier, such as apache-2.0, cc-by-4.0 or other."
        )
    hf_raise_for_status(answer)


def difference(api: HfApi, name: str, branch: str | None, folder: Path) -> tuple[list[str], list[str]]:
    """Files of a folder that a repository has not, or otherwise, and its files that an earlier upload has left."""
    listed: list[Any] = [*api.list_repo_tree(name, recursive=True, revision=branch)]
    there = {
        each.path: each.lfs.sha256 if each.lfs is not None else each.blob_id
        for each in listed
        if hasattr(each, "blob_id")  # folders have none
    }
    own = [file for file, _ in files_of(folder)]
    changed = [file for file in own if there.get(file) not in sums_of(folder / file)]
    gone = [file for file in there if file not in own and any(fnmatch(file, pattern) for pattern in REPLACED)]
    return changed, gone


def sums_of(path: Path) -> tuple[str, str]:
    """The SHA-256 sum of a file, as large files have it, and the one by which git names its content."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return sha256, digest.hexdigest()


@contextmanager
def explained_upload(name: str) -> Iterator[None]:
    """Turns what the Hub and the connection to it answer into a [`UserError`]."""
    try:
        yield
    except UserError:
        raise
    except HFValidationError as error:
        raise UserError(f"{name!r} is no name of a repository ({shorten(str(error))}). Remedy: user/name.") from error
    except OfflineModeIsEnabled as error:
        raise UserError(
            "HF_HUB_OFFLINE keeps this process off the Hub. Remedy: unset it, or write the folder alone (--dry-run)."
        ) from error
    except LocalTokenNotFoundError as error:
        raise UserError("There is no access token of the Hub. Remedy: `hf auth login`, or set HF_TOKEN.") from error
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError) as error:
        raise UserError(
            f"The Hub has no {name} that this token may write ({shorten(str(error))}). Remedy: correct the name, or "
            "use a token with write access."
        ) from error
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        remedy = {
            401: "`hf auth login` with a token that is valid, or set HF_TOKEN",
            403: "use a token with write access to this repository",
            409: "choose another name, branch or tag: this one is taken",
        }.get(status or 0, "try again later; what was uploaded is not sent twice")
        raise UserError(f"The Hub refuses {name} ({shorten(str(error))}). Remedy: {remedy}.") from error
    except OSError as error:
        raise connection_failed(name, error) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "requests", "urllib3"):
            raise
        raise connection_failed(name, error) from error


def connection_failed(name: str, error: Exception) -> UserError:
    place = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return UserError(
        f"{place} cannot be reached to upload {name} ({shorten(str(error))}). Remedy: see to the connection and try "
        "again; what was uploaded is not sent twice."
    )


def listing(files: Sequence[tuple[str, int]]) -> str:
    """Names and sizes, a line each, and their sum."""
    width = max(len(name) for name, _ in files)
    lines = [f"{name:<{width}}  {size:>13,}" for name, size in files]
    return "\n".join([*lines, f"{f'{len(files)} files':<{width}}  {sum(size for _, size in files):>13,}"])
