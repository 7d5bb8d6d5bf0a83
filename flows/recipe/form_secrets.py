"""Refuses secrets in Prefect's forms with a JSON schema, so that a server rejects them before it creates a run and
stores its parameters.

The rule is that of `grpo.secret_values.secret_in`, which is checked again when a run begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.secret_values import ASSIGNED_PATTERN, NAME_PATTERN, UNNAMED_PATTERN, VALUE_PATTERN


def without_secrets(form: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a form, changed to refuse secrets: in any field at any depth, and in any override of a
    recipe."""
    table = {
        "propertyNames": _none_of("SecretValue"),
        "patternProperties": {
            "": {"$ref": "#/definitions/AnySetting"},
            NAME_PATTERN: _none_of("Something"),
            "_env$": _none_of("KeyInsteadOfName"),
        },
    }
    any_setting = {**_none_of("SecretValue"), "items": {"$ref": "#/definitions/AnySetting"}, **table}
    overrides = {"^overrides$": {"items": _none_of("SecretAssigned")}}
    definitions = {**form.get("definitions", {}), **_SECRETS, "AnySetting": any_setting}
    whole = {**table, "patternProperties": {**table["patternProperties"], **overrides}}
    return {**form, **whole, "definitions": definitions}


_SECRETS = {
    "SecretValue": {"type": "string", "pattern": VALUE_PATTERN},
    "SecretAssigned": {"type": "string", "pattern": ASSIGNED_PATTERN},
    "KeyInsteadOfName": {"type": "string", "pattern": UNNAMED_PATTERN},
    "Something": {"type": ["string", "number", "array", "object"], "minLength": 1, "minItems": 1, "minProperties": 1},
}
"""Schemas of what a form refuses. "Something" is refused only under the name of a secret."""


def _none_of(kind: str) -> dict[str, Any]:
    # The server's answer quotes this: "'...' should not be valid under {'description': 'a secret; ...'}".
    why = "a secret, which would be recorded; put it into an environment variable and its name into api_key_env"
    return {"not": {"description": why, "$ref": f"#/definitions/{kind}"}}
