"""Prepare a Space of the Hub: the page of `recnmt demo` with models."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, SpaceCard, SpaceCardData
from packaging.requirements import Requirement

from .. import __version__
from .._loading_errors import looks_local
from .._plain_card import CARD
from ..data.files import open_output_folder
from ..errors import UserError, packages_of_extra, short_repr
from ..models.user_errors import masked
from ..training.evidence import EVIDENCE, Evidence
from .checked_copy import model_folder, short_name, write_checked_copy
from .publishing import ALLOWED, MODELS, SPACE, check_contents, check_links, explained_requests, files_of


# Files of models of the Hub: those that this package saves, and the vocabularies of transformers' other tokenizers.
FILES = (*(pattern for pattern in ALLOWED if pattern != "*.py"), "*.model", "merges.txt", "vocab.txt")
# Torch without CUDA: the free Spaces have no GPU.
INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
APP = '''"""Page to try translation models, written by `recnmt publish --space`. Run it with `python app.py`."""

import json
import os
from pathlib import Path

from huggingface_hub import snapshot_download
from recnmt_hf.demo import serve
from recnmt_hf.hub.spaces import FILES

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    places = json.loads((HERE / "recnmt_space.json").read_text("utf-8"))
    for name, place in places.items():
        if place is not None:  # a model of the Hub, and the commit that is shown
            snapshot_download(place[0], revision=place[1], local_dir=HERE / "models" / name, allow_patterns=FILES)
    # The Hub sets these variables, and its proxy has the page's name; elsewhere the page is for this computer only.
    host, port = os.environ.get("GRADIO_SERVER_NAME"), int(os.environ.get("GRADIO_SERVER_PORT", 7860))
    models = [str(HERE / "models" / name) for name in places]
    serve(models, host=host or "127.0.0.1", port=port, allowed_hosts=["*"] if host else [])
'''
TEXT = """# {title}

Translate with {models}. The page was written by `recnmt publish --space` of recnmt_hf {version}. To run it on your own
computer: `pip install -r requirements.txt`, then `python app.py`.
"""


def prepare_space(
    models: Sequence[str], output: str | Path, name: str, license: str | None = None, token: str | None = None
) -> Path:
    """
    Write the contents of a Space into a folder that runs with `python app.py`: the page, pinned requirements, this
    version of the package among them, the Space's card, and the models of local folders. Models of the Hub are
    downloaded when the page starts, at the commit that is their newest one now.

    Args:
        models (sequence of `str`): Folders of models or runs, or model ids.
        output (`str` or `Path`): A new folder, which is returned.
        name (`str`): Name of the Space.
        license (`str`, *optional*): Licence identifier of the Hub.
        token (`str`, *optional*): Access token, to look up models of the Hub.

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
            with explained_requests(model, token):
                found = HfApi(token=token).model_info(model)
            places[own] = (model, str(found.sha))
            names.append(f"[{model}](https://huggingface.co/{model})")
            files += [sibling.rfilename for sibling in found.siblings or []]
        files += [file for file, _ in files_of(working)]
        (working / "app.py").write_text(APP, encoding="utf-8")
        (working / SPACE).write_text(json.dumps(places, indent=1, ensure_ascii=False), encoding="utf-8")
        (working / "requirements.txt").write_text("\n".join([INDEX, *requirements(files), ""]), encoding="utf-8")
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
        text = TEXT.format(title=title, models=", ".join(names), version=__version__)
        SpaceCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(working / CARD)
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
