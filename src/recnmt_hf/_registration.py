"""Registration of the models and the pipeline with transformers."""

import sys
from pathlib import Path

from .families import FAMILIES
from .families.family import CONFIG, GENERATING, MODEL


_COMMAND = "recnmt"
_COMMAND_MODULE = f"{__package__}.commands.main"


def register() -> None:
    """Register all families and the pipeline task `recnmt-translation` with transformers; models save a card."""
    import transformers

    from ._plain_card import write_plain_card
    from .inference.pipeline import register_pipeline
    from .models.seq2seq_loading import Seq2SeqPreTrainedModel

    for family in FAMILIES.values():
        config_class = family.load_class(CONFIG)
        transformers.AutoConfig.register(family.model_type, config_class, exist_ok=True)
        classes = {MODEL: "AutoModel", GENERATING: "AutoModelForSeq2SeqLM", **family.further_classes}
        for suffix, auto_class in classes.items():
            getattr(transformers, auto_class).register(config_class, family.load_class(suffix), exist_ok=True)
    register_pipeline()
    Seq2SeqPreTrainedModel.write_card = staticmethod(write_plain_card)  # type: ignore[method-assign]


def is_command() -> bool:
    """Return whether this interpreter was started as `recnmt`, which registers the models later: help needs none."""
    script = (sys.argv or [""])[0]
    if script not in sys.orig_argv:  # a spawned process has its parent's arguments
        return False
    if script == "-m":  # while Python looks for the module
        return sys.orig_argv[sys.orig_argv.index(script) + 1 :][:1] == [_COMMAND_MODULE]
    return Path(script).stem == _COMMAND
