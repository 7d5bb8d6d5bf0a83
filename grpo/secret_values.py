"""Secrets in text: refused in settings, which are recorded in many places, and masked in messages.

Settings reach MLflow, Prefect, manifests, job files, reports and model cards. So a key never belongs there: a setting
such as `api_key_env` names the environment variable that holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
_SCHEME = re.compile(r"(?i)(?:(?<=\bbearer )|(?<=\bbasic ))(?=[\w.~+/-]{0,500}[\d=])[\w.~+/=-]{8,}")
"""What follows the name of a scheme in an Authorization header. A digit tells it from a word."""
_ASSIGNED = re.compile(
    r"(?i)((?:api[_-]?key|access[_-]?key|private[_-]?key|secret[_-]?key|passwd|password|passphrase|pwd|secret"
    r"|authorization|(?<!\w)(?:hf_|api_|auth_|access_|refresh_)?token)[\"']?(?:\s?=\s?|(?<=[\"']):\s?))"
    r"(\"[^\"]*\"|'[^']*'|[^\s,;&\"'}\])]+)"
)

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_LAST_WORDS = {
    *("password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"),
    *("authorization", "bearer", "cookie", "apikey", "auth"),
}
_KINDS_OF_KEY = {"api", "access", "private", "secret", "auth", "signing", "subscription", "encryption"}
_KINDS_OF_TOKEN = {
    *("", "api", "access", "auth", "bearer", "hf", "hub", "huggingface", "refresh", "session", "id", "github"),
    *("secret", "csrf", "identity", "oauth"),
}
"""Words before "token" with which it is a credential, not a word of a vocabulary."""


def is_secret_name(name: str) -> bool:
    """Whether a field or header of this name holds a secret: `api_key`, `X-Api-Key`, `hf_token`; not `max_tokens`, and
    not `api_key_env`, which names a variable."""
    words = [word.lower() for word in _WORDS.findall(name)]
    before, last = ["", "", *words][-2:]
    if last == "token":
        return before in _KINDS_OF_TOKEN
    return last in _LAST_WORDS or (last == "key" and before in _KINDS_OF_KEY)


def secret_in(settings: Any) -> str | None:
    """What is wrong with these settings, on one line with the field's path, if one of them holds a secret."""
    for path, reason in _secrets(settings, ()):
        field = ".".join(path)
        return (
            f"{field}: {reason}, and settings are recorded; put it into an environment variable (judges and engines "
            "take its name in api_key_env)"
        )
    return None


def masked(text: str) -> str:
    """`text` with its secrets replaced by ***, as far as their form gives them away. Takes linear time."""
    text = _URL_USER.sub(f"{MASK}@", text)
    text = _KNOWN.sub(MASK, text)
    text = _SCHEME.sub(MASK, text)
    return _ASSIGNED.sub(rf"\1{MASK}", text)


def without_user(url: str) -> str:
    """The URL without a user name and a password."""
    return _URL_USER.sub("", url)


def _secrets(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, what is wrong) for each field that holds a secret. Neither depth nor size of the settings sets a limit."""
    front: list[tuple[tuple[str, ...], Any]] = [(path, value)]
    while front:
        path, value = front.pop()
        if isinstance(value, Mapping):
            for name, inner in value.items():
                shown = masked(str(name))
                if shown != str(name):
                    yield (*path, shown), "its name holds a secret"
                elif is_secret_name(str(name)) and _holds(inner):
                    yield (*path, shown), "looks like a secret"
                else:
                    front.append(((*path, shown), inner))
        elif isinstance(value, (list, tuple, set, frozenset)):
            front += [((*path, str(index)), inner) for index, inner in enumerate(value)]
        elif isinstance(value, str) and (reason := _reason(value, path)):
            yield path, reason


def _holds(value: Any) -> bool:
    """Whether a field of a secret's name says anything: no setting has a truth value or nothing as its secret."""
    return value is not None and not isinstance(value, bool) and value not in ("", {}, [])


def _reason(text: str, path: tuple[str, ...]) -> str | None:
    if _URL_USER.search(text):
        return "this address has a user name or a password in it"
    if _KNOWN.search(text) or _SCHEME.search(text):
        return "this looks like a key"
    if "://" in text and masked(text) != text:
        return "this address has a secret among its parameters"
    if path and path[-1].endswith("_env") and len(text) >= 24 and "_" not in text:
        return "this looks like a key, not like the name of a variable"
    return None
