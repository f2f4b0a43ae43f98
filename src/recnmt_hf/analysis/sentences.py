"""Run a model on one sentence to inspect it, and name the tokens."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .._plain_text import is_blank
from ..data.records import Tokens
from ..errors import UserError, short_repr
from ..inference.backends.torch_model import eval_mode, shift_right
from ..inference.translator import Translator
from ..options import Range, check_value


DIRECTIONS = ("forward", "backward")  # of a recurrence, in this order


def require(has: Any, translator: Translator, what: str, remedy: str) -> None:
    """Raise `UserError` for a model that does not have the mechanism to inspect."""
    if not has:
        model_type = short_repr(translator.inspected_model().config.model_type)
        raise UserError(f"The {model_type} model has no {what}. {remedy}")


def check_not_blank(name: str, text: str) -> None:
    """Raise `UserError` if a text has no visible character."""
    if is_blank(text):
        raise UserError(f"The {name} is blank.", field=name)


def check_index(name: str, value: int, count: int) -> int:
    """Return the index of a layer or head, counted from 0. Raise `UserError` if it does not exist."""
    return check_value(name, value, int, Range(least=0, most=count - 1))


def cells(numbers: Iterable[float]) -> list[str]:
    """Return numbers as cells of a table."""
    return [f"{number:.6f}" for number in numbers]


def token_names(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Return the text of each token, or its name in the vocabulary if the text is blank."""
    names = tokenizer.convert_ids_to_tokens(ids)
    texts = (str(tokenizer.decode([token])).strip() for token in ids)
    return [text or str(name) for text, name in zip(texts, names, strict=True)]


def run_encoder(translator: Translator, sentence: str) -> tuple[Any, list[str]]:
    """Return the encoder's output for a sentence with `output_attentions=True`, and the names of the tokens."""
    check_not_blank("sentence", sentence)
    model, source = translator.inspected_model(), translator.encode_source(sentence)
    with eval_mode(model):
        encoded = model.get_encoder()(torch.tensor([source.ids], device=model.device), output_attentions=True)
    return encoded, token_names(translator.tokenizer, source.ids)


def run_pair(translator: Translator, sentence: str, translation: str | None) -> tuple[Any, Tokens, Tokens]:
    """Run a model on a sentence and a translation (default: its own); return outputs with attentions, and tokens."""
    check_not_blank("sentence", sentence)
    model = translator.inspected_model()
    if translation is None:
        translation = translator([sentence], beams=1)[0].text
    else:
        check_not_blank("translation", translation)
    source, target = translator.encode_source(sentence), translator.encode_target(translation)
    input_ids, labels = (torch.tensor([tokens.ids], device=model.device) for tokens in (source, target))
    with eval_mode(model):
        shifted = shift_right(model, labels, [target])
        outputs = model(input_ids=input_ids, decoder_input_ids=shifted, output_attentions=True, use_cache=False)
    return outputs, source, target
