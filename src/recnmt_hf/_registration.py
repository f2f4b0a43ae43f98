"""
Registration of the models with transformers. Model classes, whose import takes as long as everything else, are imported
when they are first needed.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .families import FAMILIES
from .families.family import CONFIG, GENERATING, MODEL


_COMMAND = "recnmt"
_COMMAND_MODULE = f"{__package__}.commands.main"


def register() -> None:
    """Register all families with transformers' Auto classes, and the pipeline task `recnmt-translation`."""
    import transformers

    for family in FAMILIES.values():
        config_class = family.load_class(CONFIG)
        transformers.AutoConfig.register(family.model_type, config_class, exist_ok=True)
        classes = {MODEL: "AutoModel", GENERATING: "AutoModelForSeq2SeqLM", **family.further_classes}
        for suffix, auto_class in classes.items():
            mapping = getattr(transformers, auto_class)._model_mapping
            if not isinstance(mapping._extra_content, LazyClasses):
                mapping._extra_content = LazyClasses(mapping._extra_content)
            mapping._extra_content[config_class] = partial(family.load_class, suffix)
    when_imported("transformers.pipelines", _register_pipeline)
    when_imported(f"{__package__}.models.seq2seq_loading", _write_plain_cards)


def _register_pipeline() -> None:
    import recnmt_hf.inference.pipeline  # noqa: F401  # registers itself, also if it is the one that imports them


def _write_plain_cards() -> None:
    from ._plain_card import write_plain_card
    from .models.seq2seq_loading import Seq2SeqPreTrainedModel

    Seq2SeqPreTrainedModel.write_card = staticmethod(write_plain_card)  # type: ignore[method-assign]


class LazyClasses(UserDict[Any, Any]):
    """The registered classes of an Auto class by configuration class; a `partial` imports its class when it is read."""

    def __getitem__(self, key: Any) -> Any:
        value = self.data[key]
        if isinstance(value, partial):
            value = self.data[key] = value()
        return value


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call a function after the import of a module: now if it is imported."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(MetaPathFinder):
    """Finds one module as Python does, and calls a function once it is imported."""

    def __init__(self, name: str, action: Callable[[], None]):
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # else the module is reloaded
                sys.meta_path.remove(self)
                self.action()

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]  # of this import's loader only
        return spec


def is_command() -> bool:
    """
    Return whether this interpreter was started as the console command, which registers the models after parsing: help
    and usage errors do not need them. Processes spawned by the command do not count.
    """
    script = (sys.argv or [""])[0]
    if script not in sys.orig_argv:  # a spawned process has its parent's arguments
        return False
    if script == "-m":  # while Python looks for the module
        return sys.orig_argv[sys.orig_argv.index(script) + 1 :][:1] == [_COMMAND_MODULE]
    return Path(script).stem == _COMMAND
