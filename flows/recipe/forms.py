"""Parameters of flows in Prefect's forms: their descriptions, and values that are refused before a run starts.

Prefect makes a JSON schema from a flow's signature, and its server checks the values of every run against it. It reads
constraints from `Annotated`, but takes descriptions only from the docstring. `Explained` sets them through the schema.
`with_form` defines a flow with the signature from which its form is made, for `r1 deploy` and `prefect deploy`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic_core import core_schema

from flows.recipe.form_groups import CHOICES, GROUPS
from flows.recipe.form_secrets import NO_SECRET_ASSIGNED, WithoutSecrets
from flows.recipe.load import shipped

if TYPE_CHECKING:
    from prefect import Flow

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Explained:
    """Description of a field in a form, and the names to choose from (for a list, for each of its items).

    `others`: a pattern of further names, which a recipe of the user's own may give; then the form offers the choices
    first and a text field as the alternative.

    An optional field is shown with its own type, without a switch between that type and "None". Prefect accepts null
    for it from a form, because it is not required and has no default.
    """

    text: str
    choices: Callable[[], Sequence[str]] | None = None
    others: str | None = None

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        shown = handler(schema)
        shown = {**(_or_null(shown) or shown), "description": self.text}
        if self.choices is not None:
            of = self._one_of([*self.choices()])
            if shown["type"] == "array":
                shown["items"] = of
            else:
                shown = {key: value for key, value in shown.items() if key != "type"} | of
        return shown

    def _one_of(self, names: list[str]) -> dict[str, Any]:
        listed = {"type": "string", "enum": names}
        if self.others is None:
            return listed
        another = {"type": "string", "pattern": self.others, "title": "Another name"}
        return {"anyOf": [{**listed, "title": "From the list"}, another]}


class _MayBeLeftOut:
    """A field that is not required and has no default."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.with_default_schema(handler(source), default_factory=lambda: None)


class _Arranged:
    """A model whose fields, including those of nested models, are ordered and titled according to GROUPS."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        shown = handler(schema)
        _arrange_all(shown, handler.resolve_ref_schema, set())
        return shown


REFERENCE = "latest, a key or digest (or its beginning), RUN:STAGE of a run in MLflow, or a path that begins with . / ~"
_Override = Annotated[str, Field(pattern=r"^\s*[A-Za-z_][\w.]*\s*=", json_schema_extra=NO_SECRET_ASSIGNED)]

# Parameters of recipes, in the order of the form.
RecipeName = Annotated[str, Field(min_length=1), Explained("A recipe that comes with r1flow.", shipped)]
RecipeFile = Annotated[
    str | None,
    Explained(
        "A recipe of your own instead: the path of its TOML file where the run runs; in containers below /data/r1flow."
    ),
]
Overrides = Annotated[
    list[_Override] | None, Explained('Fields to set, each "section.field=value", as reasoning_rl.kl_coef=0.01.')
]
RecipeSeed = Annotated[
    Annotated[int, Field(ge=0, le=2**53)] | None,
    Explained("Every random choice follows from it. Empty: the recipe's own."),
]
Start = Annotated[
    str | None, Explained("Begin at this stage, such as sft; the artifacts of earlier ones are taken as they are.")
]
Only = Annotated[str | None, Explained("Run this stage alone, such as evaluate; its inputs are taken as they are.")]
Force = Annotated[list[str] | None, Explained("Stages to make again although they exist.")]
RecipeInputs = Annotated[
    dict[str, str] | None, Explained(f'Artifacts to take instead of making them, as {{"sft": "latest"}}: {REFERENCE}.')
]
Approve = Annotated[list[str] | None, Explained("Gates that may pass although they would ask.")]
Dispatched = Annotated[bool, Explained("Run the stages on their work pools, not in the process of the recipe.")]

# Parameters of single stages.
Inputs = Annotated[
    Mapping[str, str] | None,
    Explained(f'What the stage reads, as {{"base": "latest"}}: {REFERENCE}. Of those left out the newest artifact.'),
]
Seed = Annotated[int, Field(ge=0, le=2**53), Explained("Every random choice follows from it.")]
StudentBase = Annotated[
    str | None, Explained("Name of the student whose base model this is. Empty: the recipe's own base model.")
]
StudentName = Annotated[str, Field(min_length=1), Explained("Name of the student.")]
AlignmentRound = Annotated[
    int, Field(ge=1), Explained("Round of alignment. From 2 on it continues from the models of the round before.")
]
ReplayShare = Annotated[
    float, Field(ge=0, lt=1), Explained("Share of earlier rounds' preferences in the data of a round from 2 on.")
]
ForGate = Annotated[bool, Explained("Record it as the evaluation that a gate reads, not as the recipe's closing one.")]
EvaluatedStages = Annotated[
    Sequence[str],
    Explained("Stages whose checkpoints are evaluated; with reward_models among them, their scores, too."),
]


def with_form(
    define: Callable[[_F], Flow[..., Any]],
    function: _F,
    choices: Mapping[str, Callable[[], Sequence[str]]] | None = None,
    others: str | None = None,
) -> Flow[..., Any]:
    """The flow that `define` makes from a function, with the signature of its form. Short fields come first, so that
    users need not scroll past a whole configuration to reach the inputs. `choices`: parameter -> function that lists
    its values. `others`: a pattern of names that these parameters accept in addition."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    # When a flow is defined, Prefect makes a schema from its signature, which takes a fifth of a command's import time.
    # The form has its own signature, so Prefect is given one without types.
    untyped = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    function.__signature__ = inspect.Signature(untyped)  # type: ignore[attr-defined]
    defined = define(function)
    del function.__signature__  # type: ignore[attr-defined]
    fields = [_form_field(parameter, (choices or {}).get(parameter.name), others) for parameter in parameters]
    fields.sort(key=lambda field: _is_model(field.annotation))
    defined.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
    return defined


def _form_field(
    parameter: inspect.Parameter, choices: Callable[[], Sequence[str]] | None, others: str | None
) -> inspect.Parameter:
    field = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    if _is_model(field.annotation):
        return field.replace(annotation=Annotated[field.annotation, WithoutSecrets(), _Arranged()])
    kind, *constraints, explained = get_args(field.annotation)
    if choices is not None:
        explained = replace(explained, choices=choices, others=others)
    field = field.replace(annotation=Annotated[(kind, WithoutSecrets(), *constraints, explained)])
    if field.default is None:
        field = field.replace(annotation=Annotated[field.annotation, _MayBeLeftOut()], default=inspect.Parameter.empty)
    return field


def _is_model(annotation: Any) -> bool:
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return any(_is_model(inner) for inner in get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _arrange_all(schema: Any, resolve: Callable[[dict[str, Any]], dict[str, Any]], seen: set[int]) -> None:
    """Arranges all models that a JSON schema refers to, in place."""
    if isinstance(schema, list):
        for item in schema:
            _arrange_all(item, resolve, seen)
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema.get("$ref"), str):
        _arrange_all(resolve({"$ref": schema["$ref"]}), resolve, seen)
    if isinstance(schema.get("properties"), dict):
        _arrange(schema)
    for inner in schema.values():
        _arrange_all(inner, resolve, seen)


def _arrange(model: dict[str, Any]) -> None:
    name, properties = model.get("title", ""), dict(model["properties"])
    subject_of = {field: subject for subject, fields in GROUPS.get(name, {}).items() for field in fields}
    order = {field: place for place, field in enumerate(subject_of)}
    model["properties"].clear()
    for position, field in enumerate(sorted(properties, key=lambda field: order.get(field, len(order)))):
        values = properties[field]
        if values.get("default", "none") is None and (alone := _or_null(values)) is not None:
            values = {key: value for key, value in alone.items() if key != "default"}
        title = values.get("title") or field.replace("_", " ").title()
        if subject := subject_of.get(field):
            values = {**values, "title": f"{subject} · {title}"}
        if choices := CHOICES.get((name, field)):
            values = {**values, "enum": [*choices]}
        model["properties"][field] = {**values, "position": position}


def _or_null(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of an optional field, without null."""
    kinds = [kind for kind in values.get("anyOf", ()) if kind != {"type": "null"}]
    alone = len(kinds) == 1 and len(values["anyOf"]) == 2 and "type" in kinds[0]
    if not alone or kinds[0].keys() & {"enum", "const"}:
        return None
    return {key: value for key, value in values.items() if key != "anyOf"} | kinds[0]
