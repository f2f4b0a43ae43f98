"""
Registration of the zoo's models with transformers' Auto classes.

Importing transformers is cheap, importing its Auto classes is not (it brings torch along). So `import recnmt_hf` only
leaves a note for the import system: as soon as an Auto module is there, the zoo registers with it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


# model_type -> (class prefix, configuration module, modeling module)
FAMILIES = {
    "biarn_transformer": ("BiARNTransformer", "configuration_biarn_transformer", "modeling_biarn_transformer"),
    "nmt_transformer": ("NMTTransformer", "configuration_nmt_transformer", "modeling_nmt_transformer"),
    "rnmt": ("RNMT", "configuration_rnmt", "modeling_rnmt"),
}
MODEL_TYPES = tuple(FAMILIES)

_AUTO_CONFIG = "transformers.models.auto.configuration_auto"
_AUTO_MODEL = "transformers.models.auto.modeling_auto"
_MODELS = f"{__package__}.models"
# What the zoo's files import from transformers. Some of these import the Auto classes on their own way, so that the
# zoo has to wait for their end.
_NEEDED = frozenset(
    f"transformers.{name}"
    for name in (
        "activations",
        "cache_utils",
        "configuration_utils",
        "generation.utils",
        "initialization",
        "masking_utils",
        "modeling_layers",
        "modeling_outputs",
        "modeling_utils",
        "processing_utils",
    )
)
_done: set[str] = set()


def is_loaded(name: str) -> bool:
    """Whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def is_loading(name: str) -> bool:
    return name in sys.modules and not is_loaded(name)


def is_busy() -> bool:
    """Whether an import is under way that the zoo's files need the end of; that end comes here again."""
    return any(is_loading(name) for name in tuple(sys.modules) if name in _NEEDED or name.startswith(f"{_MODELS}."))


def register_configs() -> None:
    """Makes `AutoConfig` know the zoo."""
    auto = sys.modules[_AUTO_CONFIG]
    for model_type, (prefix, configuration, _) in FAMILIES.items():
        module = importlib.import_module(f"{_MODELS}.{configuration}")
        auto.AutoConfig.register(model_type, getattr(module, f"{prefix}Config"), exist_ok=True)


def register_models() -> None:
    """Makes `AutoModel` and `AutoModelForSeq2SeqLM` know the zoo."""
    auto = sys.modules[_AUTO_MODEL]
    for prefix, configuration, modeling in FAMILIES.values():
        config_class = getattr(importlib.import_module(f"{_MODELS}.{configuration}"), f"{prefix}Config")
        module = importlib.import_module(f"{_MODELS}.{modeling}")
        auto.AutoModel.register(config_class, getattr(module, f"{prefix}Model"), exist_ok=True)
        auto.AutoModelForSeq2SeqLM.register(
            config_class, getattr(module, f"{prefix}ForConditionalGeneration"), exist_ok=True
        )


def after_import() -> None:
    """What to do once one of the watched modules is there."""
    for auto, act in ((_AUTO_CONFIG, register_configs), (_AUTO_MODEL, register_models)):
        if auto not in _done and is_loaded(auto) and not is_busy():
            _done.add(auto)  # before the imports that this sets off, which come here too
            try:
                act()
            except BaseException:
                _done.discard(auto)
                raise


class _ThenRegister(Loader):
    """A module's own loader, followed by [`after_import`]."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        # From here on the module counts as loaded, for the registration that it sets off itself.
        module.__spec__._initializing = False
        after_import()

    def __getattr__(self, name: str):
        return getattr(self.loader, name)


class _RegistrationFinder(MetaPathFinder):
    """Finds the watched modules as everybody else does, and has [`_ThenRegister`] load them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if fullname not in (_AUTO_CONFIG, _AUTO_MODEL, *_NEEDED) and not fullname.startswith(f"{_MODELS}."):
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = _ThenRegister(spec.loader)
                return spec
        return None


def register() -> None:
    """Registers at once with the Auto modules that are there, and with the others when they come."""
    if not any(type(finder).__name__ == _RegistrationFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistrationFinder())
    after_import()
