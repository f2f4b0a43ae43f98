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
from ..models.seq2seq_loading import CARD
from ..models.user_errors import MissingFileError, UserError
from ..training.evidence import EVIDENCE, TRANSLATIONS, Evidence, differences, public
from ..training.output_folder import RECIPE
from ..training.processes import logger
from ..training.recipe import Recipe
from ..training.recipe_yaml import dump_yaml
from .card import card_of_copy
from .checked_copy import SHARD, model_folder, write_checked_copy


# Files that a repository may contain. Nothing else is ever uploaded.
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
# Files of an earlier upload that are deleted if the folder no longer has them.
REPLACED = ("model*.safetensors", "model.safetensors.index.json", f"{TRANSLATIONS}/*", "target_tokenizer/*")
# Access tokens of the Hub, and escapes of JSON, YAML, Python and Markdown before or within one.
TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_(?:[a-z]+_)?[A-Za-z0-9]{20,}")
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[abfnrtv0]|(.))", re.DOTALL)


@dataclass(frozen=True)
class Destination:
    """
    Target of an upload.

    Attributes:
        name (`str`): `user/name`, or `name` for a repository of the user.
        private (`bool`, *optional*): Visibility of a new repository; by default that of the owner's settings.
        branch (`str`, *optional*): Created if it does not exist; by default `main`.
        pull_request (`bool`): Open a pull request instead of committing.
        message (`str`, *optional*): Commit message.
        tag (`str`, *optional*): Tag for the commit.
        collection (`str`, *optional*): Slug of a collection to add the model to.
        token (`str`, *optional*): Access token; by default the stored one.
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
    template: str | Path | None = None,
) -> Path:
    """
    Write the contents of a repository into a folder: weights, configuration, code, tokenizers, card, recipe, evidence,
    translations. The model is loaded and checked first, and the code of the card is run.

    Args:
        source (`str` or `Path`): Folder of a model or a run.
        output (`str` or `Path`): A new folder.
        name (`str`): Name of the repository.
        license, sentence, notes, template: As for [`~recnmt_hf.hub.card.card_of`].
        shard (`str`, *optional*): Largest file of weights.

    Returns:
        The folder.

    Raises:
        UserError: The model is incomplete or does not match its tokenizers; the code of the card fails; a text contains
            an access token.
        FileExistsError: The output exists and is not empty.
    """
    folder = model_folder(source)
    check_links(folder)
    evidence = Evidence.load(folder)
    with open_output_folder(output, must_be_new=True) as working:
        write_checked_copy(folder, working, lambda model: set_generation(model, evidence), shard)
        card = card_of_copy(working, evidence, name, license, sentence, notes, template)
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
            logger.warning(f"{place} is not published ({reason}).")
    return None


def files_of(folder: Path) -> list[tuple[str, int]]:
    """Return names and sizes of the files of a prepared repository."""
    found = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in found]


def is_allowed(name: str) -> bool:
    # fnmatch's star crosses slashes; what lies in a subfolder is allowed by patterns with one.
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in ALLOWED)


def check_contents(folder: Path) -> None:
    """
    Check that every file of a folder may be published.

    Raises:
        UserError: A file is not allowed in a repository, is a link, or contains an access token.
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
    Upload a prepared repository in one commit. Unchanged files are not sent again.

    Args:
        folder (`str` or `Path`): Output of [`prepare_repository`].
        to ([`Destination`]): Target of the upload.

    Returns:
        The address of the commit or pull request.

    Raises:
        UserError: The folder contains a file that may not be published, or the Hub rejects the upload.
    """
    folder = Path(folder)
    check_contents(folder)
    api = HfApi(token=to.token)
    with explained_upload(to.name):
        check_card(api, folder)
        name = str(api.create_repo(to.name, private=to.private, exist_ok=True).repo_id)
        if to.branch is not None:
            api.create_branch(name, branch=to.branch, exist_ok=True)
        own = {file for file, _ in files_of(folder)}
        obsolete = [
            file
            for file in api.list_repo_files(name, revision=to.branch)
            if file not in own and any(fnmatch(file, pattern) for pattern in REPLACED)
        ]
        # It skips unchanged files. `upload_folder` would too, but may split the upload into several commits.
        commit = api.create_commit(
            name,
            [
                *(CommitOperationAdd(path_in_repo=file, path_or_fileobj=folder / file) for file in sorted(own)),
                *(CommitOperationDelete(path_in_repo=file) for file in obsolete),
            ],
            revision=to.branch,
            commit_message=to.message or f"Upload {name.rpartition('/')[2]}",
            create_pr=to.pull_request,
        )
        if to.tag is not None:
            api.create_tag(name, tag=to.tag, revision=commit.oid, exist_ok=False)
        if to.collection is not None:
            api.add_collection_item(to.collection, item_id=name, item_type="model", exists_ok=True)
    return commit.pr_url or commit.commit_url


def check_card(api: HfApi, folder: Path) -> None:
    """Ask the Hub to validate the metadata of the card (licence, languages, scores)."""
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


@contextmanager
def explained_upload(name: str) -> Iterator[None]:
    """Turn errors of the Hub and of the connection into a [`UserError`]."""
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
    """Return the names and sizes line by line, and their sum."""
    width = max(len(name) for name, _ in files)
    lines = [f"{name:<{width}}  {size:>13,}" for name, size in files]
    return "\n".join([*lines, f"{f'{len(files)} files':<{width}}  {sum(size for _, size in files):>13,}"])
