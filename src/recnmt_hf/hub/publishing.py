"""Prepare a trained model as a repository of the Hub, or models as a Space with `recnmt demo`, and upload them."""

import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, SpaceCard, SpaceCardData
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils import get_token
from packaging.requirements import Requirement
from transformers import GenerationConfig

from .._loading_errors import looks_local
from .._plain_card import CARD
from .._version import __version__
from ..data.files import open_output_folder
from ..data.tree_inputs import RELATIONS_FILE
from ..errors import UserError, explained, packages_of_extra, short_repr, shorten
from ..models.user_errors import masked, remember_secrets
from ..training.checkpoints import RECIPE
from ..training.evidence import EVIDENCE, TRANSLATIONS, Evidence, differences, without_private
from ..training.processes import logger
from ..training.recipe import Recipe
from ..training.recipe_yaml import dump_yaml
from .card import card_of_copy
from .checked_copy import SHARD, model_folder, short_name, write_checked_copy


HERE = Path(__file__).parent  # of templates
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
# Files of models that a Space downloads.
FILES = (*(pattern for pattern in ALLOWED if pattern != "*.py"), "*.model")
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

    Raises:
        UserError: The model is incomplete or does not match its tokenizers; the code of the card fails; a text contains
            an access token.
        FileExistsError: The output exists and is not empty.
    """
    folder = model_folder(source)
    check_links(folder)
    evidence = Evidence.load(folder)
    with open_output_folder(output, must_be_new=True) as working:
        write_checked_copy(folder, working, shard)
        # `model.generate` gets beams and length penalty of the tests, although it divides by the length itself, and a
        # limit if training set none.
        generation: Any = GenerationConfig.from_pretrained(working)
        decoding = evidence.tests[0].decoding if evidence.tests else {}
        generation.num_beams = decoding.get("beams", generation.num_beams)
        if decoding and (generation.num_beams or 1) > 1:
            generation.length_penalty = float(decoding.get("length_penalty", 1.0))
        if generation.max_length is None and generation.max_new_tokens is None:
            generation.max_length = 256
        generation.save_pretrained(working)
        (working / CARD).write_text(card_of_copy(working, evidence, name, **card).content, encoding="utf-8")
        if (folder / EVIDENCE).is_file():
            evidence.save(working)
        for file in (test.translations for test in evidence.tests):
            if Path(file).parent != Path(TRANSLATIONS):  # it would lead to any file of this machine
                raise UserError(f"{file} of evidence.json is not a file of translations.", field=file)
            (working / TRANSLATIONS).mkdir(exist_ok=True)
            shutil.copyfile(folder / file, working / file)
        if (recipe := recipe_of(folder, evidence)) is not None:
            (working / RECIPE).write_text(recipe, encoding="utf-8")
        check_contents(working)
    return Path(output)


def check_links(folder: Path) -> None:
    """Raise `UserError` for a symbolic link, which may lead to any file of this machine."""
    # A snapshot in the Hub's cache consists of links to the cache's blobs.
    blobs = Path(os.path.realpath(folder)).parent.parent / "blobs"
    for path in (path for pattern in ("*", "*/*") for path in sorted(folder.glob(pattern))):
        if path.is_symlink() and Path(os.path.realpath(path)).parent != blobs:
            raise UserError(f"{path} is a symbolic link, which is not published.", field=path)


def recipe_of(folder: Path, evidence: Evidence) -> str | None:
    """Return the recipe of a model, without private values, if its evidence proves that it is not another model's."""
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


def files_of(folder: Path) -> list[str]:
    """Return the names of the files of a prepared repository."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [path.relative_to(folder).as_posix() for path in paths]


def is_allowed(name: str, kind: str = "model") -> bool:
    """Return whether a repository may contain a file of this name."""
    if kind == "space":
        first, _, rest = name.partition("/")
        return is_allowed(rest.partition("/")[2]) if first == MODELS else name in SPACE_FILES
    # A star of fnmatch also matches slashes, so their numbers are compared.
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in ALLOWED)


def check_contents(folder: Path, kind: str = "model") -> None:
    """Raise `UserError` if a file is not allowed in a repository, is a link, or contains an access token."""
    for name in files_of(folder):
        path = folder / name
        if path.is_symlink() or not is_allowed(name, kind):
            raise UserError(f"{name} is a symbolic link or unexpected file; remove it.", field=name)
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
    Upload the output of [`prepare_repository`] or [`prepare_space`] in one commit, and return the
    address of the commit or pull request. Unchanged files are not sent again.

    Raises:
        UserError: The folder contains a file that may not be published, the Hub rejects the card or the upload, or a
            Space of this name has other files.
    """
    folder = Path(folder)
    check_contents(folder, to.kind)
    api = HfApi()
    kind: dict[str, Any] = {"repo_type": to.kind}
    with explained_requests(to.name):
        sdk = "gradio" if to.kind == "space" else None
        name = api.create_repo(to.name, private=to.private, exist_ok=True, space_sdk=sdk, **kind).repo_id
        if to.branch is not None:
            api.create_branch(name, branch=to.branch, exist_ok=True, **kind)
        present = api.list_repo_files(name, revision=to.branch, **kind)
        replaced: tuple[str, ...] = REPLACED
        if to.kind == "space":
            package = "recnmt_hf/"  # a copy of this package, in Spaces of earlier versions
            if {SPACE, f"{package}__init__.py"}.isdisjoint(present) and not set(present) <= {CARD, ".gitattributes"}:
                raise UserError(f"The Space {name} has files of other programs; choose another name.", field=name)
            replaced = (f"{package}*", f"{MODELS}/*")
        own = files_of(folder)
        left = [file for file in present if file not in own and any(fnmatch(file, one) for one in replaced)]
        # Unchanged files are skipped, and the card is validated. `upload_folder` may make several commits.
        commit = api.create_commit(
            name,
            [CommitOperationAdd(file, folder / file) for file in own] + [CommitOperationDelete(file) for file in left],
            revision=to.branch,
            commit_message=to.message or f"Upload {name.rpartition('/')[2]}",
            create_pr=to.pull_request,
            **kind,
        )
        if to.tag is not None:
            api.create_tag(name, tag=to.tag, revision=commit.oid, exist_ok=False, **kind)
    return commit.pr_url or commit.commit_url


@contextmanager
def explained_requests(name: str) -> Iterator[None]:
    """Turn errors of the Hub and of the connection into a [`UserError`], with the token masked."""
    remember_secrets(f"?token={get_token()}")
    with explained(f"{name}: {ENDPOINT} refuses or cannot be reached", name):
        yield


def listing(folder: Path) -> str:
    """Return the names and sizes of the files of a prepared repository line by line, and their sum."""
    sizes = {name: (folder / name).lstat().st_size for name in files_of(folder)}
    width = max(map(len, sizes))
    sizes[f"{len(sizes)} files"] = sum(sizes.values())
    return "\n".join(f"{name:<{width}}  {size:>13,}" for name, size in sizes.items())


def prepare_space(models: Sequence[str], output: str | Path, name: str, license: str | None = None) -> Path:
    """
    Write the contents of a Space into a folder that runs with `python app.py`: the page, pinned requirements, this
    version of the package among them, the Space's card, and the models of local folders. Models of the Hub are
    downloaded when the page starts, at the commit that is their newest one now.

    Args:
        models (sequence of `str`): Folders of models or runs, or model ids.
        output (`str` or `Path`): A new folder, which is returned.
        name (`str`): Name of the Space.
        license (`str`, *optional*): Licence identifier of the Hub.

    Raises:
        UserError: A model is incomplete, does not match its tokenizers, does not exist or has no safetensors; two
            models have one name; a text contains an access token; a package that the page needs is not installed.
        FileExistsError: The output exists and is not empty.
    """
    places: dict[str, tuple[str, str] | None] = {}  # model and commit of the Hub; `None`: a copy of a folder
    names, files = [], []
    with open_output_folder(output, must_be_new=True) as working:
        for model in models:
            own = re.sub(r"[^\w.-]+", "_", short_name(model)).strip("_.") or "model"
            if own in places:
                raise UserError(f"another model has the name {short_repr(own)} too.", field=model)
            if looks_local(model):
                copy_model(model_folder(model), working / MODELS / own)
                places[own] = None
                names.append(own)
                continue
            with explained_requests(model):
                found = HfApi().model_info(model)
            places[own] = (model, str(found.sha))
            names.append(f"[{model}](https://huggingface.co/{model})")
            files += [sibling.rfilename for sibling in found.siblings or []]
        files += files_of(working)
        shutil.copyfile(HERE / "space_app.template", working / "app.py")
        (working / SPACE).write_text(json.dumps(places, indent=1, ensure_ascii=False), encoding="utf-8")
        index = "--extra-index-url https://download.pytorch.org/whl/cpu"  # the free Spaces have no GPU
        (working / "requirements.txt").write_text("\n".join([index, *requirements(files), ""]), encoding="utf-8")
        title = name.rpartition("/")[2]
        data = SpaceCardData(
            title=title,
            emoji="💬",
            colorFrom="blue",
            colorTo="green",
            sdk="gradio",
            sdk_version=metadata.version("gradio"),
            python_version=".".join(platform.python_version_tuple()[:2]),
            app_file="app.py",
            license=license,
            models=[place[0] for place in places.values() if place] or None,
            short_description=f"Translate with {title}"[:60],  # the Hub accepts no longer one
        )
        values = {"title": title, "models": ", ".join(names), "version": __version__}
        SpaceCard.from_template(data, str(HERE / "space_card.md"), **values).save(working / CARD)
        check_contents(working, "space")
    return Path(output)


def copy_model(folder: Path, copy: Path) -> None:
    """Copy a checked model with its card and evidence, but not its code: the Space has that of the package."""
    check_links(folder)
    copy.mkdir(parents=True)
    write_checked_copy(folder, copy)
    for file in copy.glob("*.py"):
        file.unlink()
    if (folder / CARD).is_file():
        # Cards of earlier versions may have secrets.
        (copy / CARD).write_text(masked((folder / CARD).read_text(encoding="utf-8")), encoding="utf-8")
    if (folder / EVIDENCE).is_file():
        Evidence.load(folder).save(copy)


def requirements(files: Iterable[str]) -> list[str]:
    """Return this package and those that the page needs for models with these files, at the versions installed here."""
    extras = ["demo", *(["marian"] if any(name.endswith((".spm", ".model")) for name in files) else [])]
    with packages_of_extra(",".join(extras), "The page"):
        own = map(Requirement, metadata.requires("recnmt-hf") or [])
        wanted: list[Any] = [{"extra": extra} for extra in extras]
        needed = [one.name for one in own if one.marker is None or any(map(one.marker.evaluate, wanted))]
        # A local version such as that of 2.13.0+cpu is not in the index.
        pins = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in dict.fromkeys(needed)]
        return [f"recnmt-hf=={__version__}", *pins]
