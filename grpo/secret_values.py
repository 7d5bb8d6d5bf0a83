"""Detects secrets in text: they are refused in settings, which are recorded in many places, and masked in messages.

Settings are stored in MLflow, Prefect, manifests, job files, reports and model cards. So they must not contain keys: a
setting such as `api_key_env` names the environment variable that holds the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MASK = "***"

_URL_USER = re.compile(
    r"(?<=://)(?:[^\s/?#@\"'<>]+"  # https://user:password@host, https://token@host
    r"|[^\s/:@\"'<>\[]*:(?!\d+(?:[/?#\s]|$))[^\s@\"'<>]{1,500})@"  # a password with a slash that is not escaped
)
_KNOWN = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      sk-[\w-]{16,} | hf_[A-Za-z0-9]{16,} | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{16,}
    | AKIA[0-9A-Z]{16} | AIza[\w-]{30,} | xox[abprs]-[\w-]{10,} | nvapi-[\w-]{20,} | dapi[0-9a-f]{32}
    | eyJ[\w-]{10,1000}\.eyJ[\w-]{10,4000}\.[\w-]*
    )
    | -----BEGIN[A-Z ]{0,30}\ PRIVATE\ KEY-----""",
    re.VERBOSE,
)
"""Forms of keys by their issuers: OpenAI and others, Hugging Face, GitHub, GitLab, AWS, Google, Slack, NVIDIA,
Databricks; JSON web tokens; PEM."""
_SCHEME = re.compile(r"(?:(?<=\bbearer )|(?<=\bbasic ))(?=[\w.~+/-]{0,500}[\d=])[\w.~+/=-]{8,}", re.IGNORECASE)
"""The credentials after the scheme's name in an Authorization header. A digit distinguishes them from a word."""
_ASSIGNED = re.compile(
    r"(?i)((?:api[_-]?key|access[_-]?key|private[_-]?key|secret[_-]?key|passwd|password|passphrase|pwd|secret"
    r"|authorization|(?<!\w)(?:hf_|api_|auth_|access_|refresh_)?token)[\"']?(?:\s?=\s?|(?<=[\"']):\s?))"
    r"(\"[^\"]*\"|'[^']*'|[^\s,;&\"'}\])]+)"
)

_LAST_WORDS = "password|passwd|passphrase|pwd|secrets?|credentials?|authorization|bearer|cookie|apikey|auth"
_OF_A_KEY = "api|access|private|secret|auth|signing|subscription|encryption"
_OF_A_TOKEN = (
    "api|access|auth|bearer|hf|hub|huggingface|refresh|session|id|github|secret|csrf|identity|oauth"  # not of a text
)
_BETWEEN = "[^A-Za-z0-9]*"
_NAME = (
    r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]))"  # here a word of the name begins
    rf"(?i:{_LAST_WORDS}|(?:{_OF_A_KEY}){_BETWEEN}key|(?:{_OF_A_TOKEN}){_BETWEEN}token)"
)
NAME_PATTERN = rf"{_NAME}{_BETWEEN}$|^{_BETWEEN}(?i:token){_BETWEEN}$"
"""Finds a name whose value is a secret; see `is_secret_name`."""
ASSIGNED_PATTERN = rf"(?:{_NAME}|(?<![\w-])(?i:token))[\"'\s]*="
"""Finds such a name with an assigned value in TOML, also in a table, such as in an override of a recipe."""
VALUE_PATTERN = rf"{_URL_USER.pattern}|(?x:{_KNOWN.pattern})|(?i:{_SCHEME.pattern})|://\S{{0,2000}}?{_NAME}="
"""Finds a value that has the form of a secret, or an address that contains one."""
UNNAMED_PATTERN = r"^[^_]{24,}$"
"""Finds a value that is not the name of an environment variable but a key that was put there by mistake."""


def is_secret_name(name: str) -> bool:
    """Whether a field or header of this name holds a secret: `api_key`, `X-Api-Key`, `hf_token`; not `max_tokens`, and
    not `api_key_env`, which names a variable."""
    return _SECRET_NAME.search(name) is not None


_SECRET_NAME, _UNNAMED = re.compile(NAME_PATTERN), re.compile(UNNAMED_PATTERN)


def secret_in(settings: Any) -> str | None:
    """What is wrong with these settings, on one line with the field's path, if one of them holds a secret."""
    for place, value in walk(settings):
        if reason := _reason(place.name, value):
            return (
                f"{masked(str(place))}: {reason}, and settings are recorded; put it into an environment variable "
                "(judges and engines take its name in api_key_env)"
            )
    return None


def masked(text: str) -> str:
    """`text` with its secrets replaced by ***, if they are recognizable by their form. Takes linear time."""
    text = _URL_USER.sub(f"{MASK}@", text)
    text = _KNOWN.sub(MASK, text)
    text = _SCHEME.sub(MASK, text)
    return _ASSIGNED.sub(rf"\1{MASK}", text)


def without_user(url: str) -> str:
    """The URL without user name and password."""
    return _URL_USER.sub("", url)


@dataclass(frozen=True)
class FieldPath:
    """The place of a value in nested settings. Links to its parent: separate full paths for 100,000 nested tables would
    take quadratic time."""

    name: str
    around: FieldPath | None

    def __str__(self) -> str:
        names, place = [], self
        while place.around is not None:
            names.append(place.name)
            place = place.around
        return ".".join(reversed(names))


def walk(settings: Any) -> Iterator[tuple[FieldPath, Any]]:
    """Yields every value of nested settings with its place; tables and lists come before their contents."""
    front = [(FieldPath("", None), settings)]
    while front:
        place, value = front.pop()
        yield place, value
        if isinstance(value, Mapping):
            front += [(FieldPath(str(name), place), inner) for name, inner in value.items()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            front += [(FieldPath(str(index), place), inner) for index, inner in enumerate(value)]


def _holds(value: Any) -> bool:
    """Whether a field with a secret's name has a value that could be a secret: booleans and empty values cannot."""
    return value is not None and not isinstance(value, bool) and value not in ("", {}, [])


def _reason(name: str, value: Any) -> str | None:
    if masked(name) != name:
        return "its name holds a secret"
    if is_secret_name(name) and _holds(value):
        return "looks like a secret"
    if not isinstance(value, str):
        return None
    if _URL_USER.search(value):
        return "this address has a user name or a password in it"
    if _KNOWN.search(value) or _SCHEME.search(value):
        return "this looks like a key"
    if "://" in value and masked(value) != value:
        return "this address has a secret among its parameters"
    if name.endswith("_env") and _UNNAMED.search(value):
        return "this looks like a key, not like the name of a variable"
    return None
