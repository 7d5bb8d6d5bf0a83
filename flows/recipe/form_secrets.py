"""Refuses secrets in Prefect's forms with a JSON schema, so that a server rejects them before it creates a run and
stores its parameters.

The rule is that of `grpo.secret_values.secret_in`, which is checked again when a run begins.
"""

from __future__ import annotations

from typing import Any

from pydantic import RootModel

from grpo.secret_values import ASSIGNED_PATTERN, NAME_PATTERN, UNNAMED_PATTERN, VALUE_PATTERN


class WithoutSecrets:
    """In `Annotated`: a parameter of a form that takes no secret, at any depth."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        # "then" and not "allOf", from which Prefect's interface would make the field.
        return {**handler(schema), "if": True, "then": handler(AnySetting.__pydantic_core_schema__)}


class AnySetting(RootModel["list[AnySetting]"]):
    """A value of any type without secrets. Only its JSON schema is used; a list, so that the schema has a reference to
    itself."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        this = handler(schema)["items"]
        something = {"type": ["string", "number", "array", "object"], "minLength": 1, "minItems": 1, "minProperties": 1}
        return {
            **_refuse_text(VALUE_PATTERN),
            "items": this,
            "propertyNames": _refuse_text(VALUE_PATTERN),
            "patternProperties": {
                "": this,
                NAME_PATTERN: _refuse(something),
                "_env$": _refuse_text(UNNAMED_PATTERN),
            },
        }


def _refuse(values: dict[str, Any]) -> dict[str, Any]:
    # The server's answer quotes the schema below "not", which therefore has no pattern: "'...' should not be valid
    # under {'description': 'a secret; ...'}".
    why = "a secret, which would be recorded; put it into an environment variable and its name into api_key_env"
    return {"if": values, "then": {"not": {"description": why}}}


def _refuse_text(pattern: str) -> dict[str, Any]:
    return _refuse({"type": "string", "pattern": pattern})


NO_SECRET_ASSIGNED = _refuse_text(ASSIGNED_PATTERN)
"""JSON schema of an override that assigns no secret."""
