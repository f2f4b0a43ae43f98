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
    "nmt_transformer": ("NMTTransformer", "configuration_nmt_transformer", "modeling_nmt_transformer"),
}
MODEL_TYPES = tuple(FAMILIES)

_AUTO_CONFIG = "transformers.models.auto.configuration_auto"
_AUTO_MODEL = "transformers.models.auto.modeling_auto"
_MODELS = f"{__package__}.models"


def is_loaded(name: str) -> bool:
    """Whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def is_loading(name: str) -> bool:
    return name in sys.modules and not is_loaded(name)


def register_configs() -> None:
    """Makes `AutoConfig` know the zoo."""
    auto = sys.modules[_AUTO_CONFIG]
    for model_type, (prefix, configuration, _) in FAMILIES.items():
        module = importlib.import_module(f"{_MODELS}.{configuration}")
        auto.AutoConfig.register(model_type, getattr(module, f"{prefix}Config"), exist_ok=True)


def register_models(model_types: Sequence[str] = MODEL_TYPES) -> None:
    """Makes `AutoModel` and `AutoModelForSeq2SeqLM` know the zoo."""
    auto = sys.modules[_AUTO_MODEL]
    for model_type in model_types:
        prefix, configuration, modeling = FAMILIES[model_type]
        if is_loading(f"{_MODELS}.{modeling}"):
            continue  # it registers itself when its import ends
        config_class = getattr(importlib.import_module(f"{_MODELS}.{configuration}"), f"{prefix}Config")
        module = importlib.import_module(f"{_MODELS}.{modeling}")
        auto.AutoModel.register(config_class, getattr(module, f"{prefix}Model"), exist_ok=True)
        auto.AutoModelForSeq2SeqLM.register(
            config_class, getattr(module, f"{prefix}ForConditionalGeneration"), exist_ok=True
        )


def after_import(name: str) -> None:
    """What to do once module `name` is there."""
    if name == _AUTO_CONFIG:
        register_configs()
    elif name == _AUTO_MODEL:
        register_models()
    elif is_loaded(_AUTO_MODEL):
        register_models([kind for kind, family in FAMILIES.items() if name == f"{_MODELS}.{family[2]}"])


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
        after_import(module.__name__)

    def __getattr__(self, name: str):
        return getattr(self.loader, name)


class _RegistrationFinder(MetaPathFinder):
    """Finds the watched modules as everybody else does, and has [`_ThenRegister`] load them."""

    watched = {_AUTO_CONFIG, _AUTO_MODEL, *(f"{_MODELS}.{family[2]}" for family in FAMILIES.values())}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if fullname not in self.watched:
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
    for name in (_AUTO_CONFIG, _AUTO_MODEL):
        if is_loaded(name):
            after_import(name)
