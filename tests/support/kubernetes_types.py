"""A manifest held against the types of the Kubernetes API, which its client has from the API's own description."""

from __future__ import annotations

import re
from typing import Any

from kubernetes_asyncio.client import Configuration, models

PLAIN = {"str": str, "int": int, "float": (int, float), "bool": bool, "object": object}


def faults(value: Any, kind: str, path: str = "") -> list[str]:
    """Where `value` is not of the type `kind`: unknown fields, wrong types, required fields that are missing."""
    if listed := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            return [f"{path}: {value!r} is no list"]
        return [f for i, item in enumerate(value) for f in faults(item, listed[1], f"{path}.{i}")]
    if mapped := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, dict):
            return [f"{path}: {value!r} is no mapping"]
        # A quantity, as of resources, is a string for the client; the API takes numbers too.
        quantity = path.endswith((".limits", ".requests"))
        inner = "object" if quantity and mapped[1] == "str" else mapped[1]
        return [f for name, item in value.items() for f in faults(item, inner, f"{path}.{name}")]
    if kind in PLAIN:
        fits = isinstance(value, PLAIN[kind]) and not (kind == "int" and isinstance(value, bool))
        return [] if fits else [f"{path.lstrip('.')}: {value!r} is no {kind}"]
    return _model_faults(value, getattr(models, kind), path)


def _model_faults(value: Any, model: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path.lstrip('.')}: {value!r} is no {model.__name__}"]
    attributes = {written: name for name, written in model.attribute_map.items()}
    found = []
    for written, item in value.items():
        if written not in attributes:
            found.append(f"{path}.{written}: unknown".lstrip("."))
        else:
            found += faults(item, model.openapi_types[attributes[written]], f"{path}.{written}")
    checked = Configuration()
    checked.client_side_validation = True
    try:  # the client's setters know what is required and within which bounds
        model(**{attributes[k]: v for k, v in value.items() if k in attributes}, local_vars_configuration=checked)
    except ValueError as error:
        found.append(f"{path}: {error}".lstrip("."))
    return found
