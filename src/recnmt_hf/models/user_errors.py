"""Errors that the user can correct, and the messages of configurations and models. All others: recnmt_hf/errors.py."""

import re
import reprlib
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any
from urllib.parse import unquote


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlevel, _short.maxlist, _short.maxdict = 2, 4, 4

MASK = "***"
# Secrets in a text, as the last group: the user part of URLs (of the first protocols it is a container or repository),
# values of parameters with such names, access tokens of the Hub.
_SECRETS = (
    re.compile(r"""(?i)(?<![\w+.-])(?!(?:abfss?|wasbs?|git|github):)([a-z][\w+.-]*://)([^\s/?#"'<>|]+)(?=@)"""),
    re.compile(
        r"""(?i)([?&;][^\s=&;#"'<>|]*?(?:token|secret|sig|pass|pwd|key|credential|auth|jwt|session|policy)"""
        r"""[^\s=&;#"'<>|]*=)([^\s&;#"'<>|]*[^\s&;#"'<>|,.:)\]}])"""
    ),
    re.compile(r"(?<![A-Za-z0-9])()(hf_(?:[a-z]+_)?[A-Za-z0-9]{20,})"),
)
# Names of fields whose whole value is a secret.
_SECRET_NAME = re.compile(r"(?i)(.*[._-])?(token|secret|passw(or)?d|credentials?|(api|access|account|secret)_?key)|key")
# Secrets that the process was given. Shorter ones would also mask other words of a message.
_known_secrets, _LEAST_SECRET = set[str](), 6

# Code -> message: what is wrong, the value, what is allowed, what to do. Names in braces are `field`, `value` (quoted)
# and details; `remedy` is a sentence without its full stop.
MESSAGES: dict[str, str] = {
    # configurations
    "config.wrong_value": "{field}={value} is not allowed; it must be {allowed}.",
    "config.conflict": "{field}={value} is not allowed with {context}; it must be {allowed}.",
    "config.unknown_preset": "{config} has no preset {value}. Choose one of {names}, or pass the fields to {config}().",
    # inputs and outputs
    "model.missing_decoder_input": "{field} is missing. Pass it or labels. To translate, call generate().",
    "model.ids_or_embeddings": "Pass either token ids or embeddings (input_ids or inputs_embeds).",
    "model.id_outside_vocabulary": "{field} contains {value}; it must be from 0 to {last}. Use the model's tokenizer.",
    "model.wrong_label": "{field} contains {value}; it must be from 0 to {last}, or -100 to be ignored.",
    "model.missing_special_token": "{field} is None in the configuration. Set it, or pass decoder_input_ids.",
    "model.missing_heads": "{field} is missing. Pass it with dependency_relations.",
    "model.tree_shape": "{field} has the shape {value}; it must be {shape}, or with a third dimension for several "
    "edges of a token. Both columns have the same shape.",
    "model.mask_shape": "{field} has the shape {value}; it must be (batch_size, source_length), 1 for tokens.",
    "model.sequence_too_long": "A sequence of {length} tokens exceeds {field}={value}. Shorten or split the input.",
    "model.missing_memory": "{field} lacks {memory}_hidden_state. Pass the unchanged output of get_encoder().",
    "model.pair_counts": "input_ids has {rows} rows and {field} has {value}. Pass a second sentence for each.",
    "model.attention_kernel": "{field}={value} does not support self_attention_type={kind!r}. Use 'sdpa' or 'eager'.",
    "model.beams_of_samples": "{field}={value} is not allowed with latent_inference='sample', since beams with "
    "different samples are not comparable. Use one beam, or set latent_inference='mean' in the configuration.",
    # embeddings and checkpoints
    "model.shared_embeddings": "{field}={value} forbids resizing one side. Call resize_token_embeddings for both.",
    "model.embeddings_differ": "{field} differs from {source}. Do not adapt embeddings, or set "
    "share_encoder_decoder_embeddings=False.",
    "model.other_baseline": "{model} and {field} have no parameter in common. Use a baseline of the same sizes.",
    "checkpoint.no_safetensors": "{field} contains no .safetensors file. Pass a folder written by save_pretrained.",
    # families
    "gradients.second_derivative": "This gradient cannot be differentiated again. Set the environment variable "
    "RECNMT_FAST_PATHS=0, pass return_logits=True, and do not compile the model.",
    "cache.past_not_recorded": "{steps} steps to undo were not recorded. Call activate_past_recording() before them.",
    "cache.unknown_name": "{field} is not an argument for a cache; use cache. If you did not pass {field}, "
    "install an older version of transformers.",
    "cache.no_recurrent_state": "This {kind} cannot store recurrent states. Omit it, or create its caches "
    "with config=model.config.get_text_config(decoder=True). Prefix tuning is not supported; use LoRA.",
    "layers.unknown_cell": "{field}={value} is not a recurrent cell. Choose one of {allowed}.",
}


def masked(value: Any, name: str = "") -> Any:
    """
    Return a text, or a value of a recipe (of the field `name`), for the eyes of others: without passwords, signatures
    and access tokens. A masked text stays as it is.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(masked(item, name) for item in value)
    if not isinstance(value, str) or isinstance(value, Enum):
        return value
    text = MASK if value and _SECRET_NAME.fullmatch(name) else str.__str__(value)
    for pattern in _SECRETS:
        text = pattern.sub(rf"\1{MASK}", text)
    return text


def remember_secrets(text: str) -> None:
    """Mask the secrets of a text in all later messages, wherever they stand there."""
    for found in (match[2] for pattern in _SECRETS for match in pattern.finditer(text)):
        secret = found.partition(":")[2] or found
        _known_secrets.update(part for part in (secret, unquote(secret)) if len(part) >= _LEAST_SECRET)


def masked_message(text: str) -> str:
    """Return a message without secrets, those included that the process was given."""
    for secret in _known_secrets:
        text = text.replace(secret, MASK)
    return masked(text)


def short_repr(value: Any) -> str:
    """Quote a value for a message, on at most one line."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    return str(value.value) if isinstance(value, Enum) else _short.repr(value)


class UserError(ValueError):
    """
    An input that the user has to correct, a `ValueError`. `code` is a key of `MESSAGES`, `field` the wrong option,
    field or file (put before a message that does not mention it), `value` its value, `details` are further values.
    """

    def __init__(self, code: str, *, field: str | None = None, value: Any = None, **details: Any) -> None:
        self.code, self.field, self.value, self.details = code, field, value, details
        message = MESSAGES[code]
        remedy = str(details.get("remedy", ""))  # begins a sentence
        details = details | {"remedy": remedy[:1].upper() + remedy[1:]}
        text = message.format(field=field, value=short_repr(masked(value, field or "")), **details)
        super().__init__(masked_message(text if field is None or "{field}" in message else f"{field}: {text}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), field=self.field, value=self.value, **self.details), (self.code,)

    def inside(self, place: str) -> "UserError":
        """Return this error with its field in a section: `max_steps` inside `training` is `training.max_steps`."""
        field = f"{place}.{self.field}" if self.field else place
        return type(self)(self.code, field=field, value=self.value, **self.details)
