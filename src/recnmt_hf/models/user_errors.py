"""Errors that the user can correct, and messages without secrets."""

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


def masked(value: Any, name: str = "") -> Any:
    """Return a text, or a value of a recipe (of the field `name`), without passwords, signatures and access tokens."""
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
    """Mask the secrets of a text in all later messages."""
    for found in (match[2] for pattern in _SECRETS for match in pattern.finditer(text)):
        secret = found.partition(":")[2] or found
        _known_secrets.update(part for part in (secret, unquote(secret)) if len(part) >= _LEAST_SECRET)


def masked_message(text: str) -> str:
    """Return a message without secrets, those included that the process was given."""
    for secret in _known_secrets:
        text = text.replace(secret, MASK)
    return masked(text)


def short_repr(value: Any, name: str = "") -> str:
    """Quote a value (of the field `name`) for a message, on at most one line and without secrets."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    return str(value.value) if isinstance(value, Enum) else _short.repr(masked(value, name))


class UserError(ValueError):
    """An input that the user has to correct. `field` is the wrong option, field or file: it begins the message."""

    def __init__(self, message: str, *, field: Any = None) -> None:
        self.message, self.field = message, None if field is None else str(field)
        named = self.field is None or self.field in message
        super().__init__(masked_message(message if named else f"{self.field}: {message}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), field=self.field), (self.message,)

    def inside(self, place: str) -> "UserError":
        """Return this error with its field in a section: `max_steps` inside `training` is `training.max_steps`."""
        field = f"{place}.{self.field}" if self.field else place
        message = self.message
        if self.field and message.startswith(self.field):
            message = field + message.removeprefix(self.field)
        return type(self)(message, field=field)
