"""Parameters of flows in Prefect's forms: their descriptions, and the values that are refused before a run starts.

Prefect makes a JSON schema of a flow's signature and checks the values of every run against it on the server. It takes
constraints from `Annotated`, but sets descriptions itself, from the docstring or to none. `Explained` sets them through
the schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from prefect.utilities.callables import parameter_schema
from pydantic import Field

from flows.recipe.load import shipped


@dataclass(frozen=True)
class Explained:
    """Description of a field in a form."""

    text: str

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(core_schema), "description": self.text}


REFERENCE = "latest, a key or digest (or its beginning), RUN:STAGE of a run in MLflow, or a path that begins with . / ~"
_Override = Annotated[str, Field(pattern=r"^\s*[A-Za-z_][\w.]*\s*=")]

# Parameters of recipes, in the order of the form.
RecipeName = Annotated[
    str,
    Field(min_length=1),
    Explained(
        f"A recipe that is shipped ({', '.join(shipped())}), or the path of a TOML file on the worker's machine."
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
    dict[str, str] | None, Explained(f'Artifacts to take for stages, as {{"sft": "latest"}}: {REFERENCE}.')
]
Approve = Annotated[list[str] | None, Explained("Gates that may pass although they would ask.")]
Dispatched = Annotated[bool, Explained("Run the stages on their work pools, not in the process of the recipe.")]

# Parameters of single stages.
Inputs = Annotated[
    Mapping[str, str] | None,
    Explained(f'What the stage reads, as {{"base": "latest"}}: {REFERENCE}. Of those left out the newest artifact.'),
]
Seed = Annotated[int, Field(ge=0, le=2**53), Explained("Every random choice follows from it.")]
EvaluatedStages = Annotated[
    Sequence[str],
    Explained("Stages whose checkpoints are evaluated; with reward_models among them, their scores, too."),
]


def schema(flow: Any) -> dict[str, Any]:
    """The JSON schema that the form of a flow's deployment is drawn from.

    A field that may be left out is drawn as what it is, without a switch between its type and "None": in the values of
    a run Prefect takes null for a field that is not required and has no default, unless it is a model or a choice. In
    the values of a deployment it does not. Short fields come first, so that nobody has to scroll past a whole
    configuration to the inputs.
    """
    form: dict[str, Any] = parameter_schema(flow).model_dump_for_openapi()
    for model in (form, *form.get("definitions", {}).values()):
        for values in model.get("properties", {}).values():
            if values.get("default", "none") is None and (alone := _or_null(values)) is not None:
                del values["anyOf"], values["default"]
                values.update(alone)
    ordered = sorted(form["properties"].values(), key=lambda values: ("type" not in values, values["position"]))
    for position, values in enumerate(ordered):
        values["position"] = position
    return form


def _or_null(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The type of an optional field besides null."""
    kinds = [kind for kind in values.get("anyOf", ()) if kind != {"type": "null"}]
    alone = len(kinds) == 1 and len(values["anyOf"]) == 2 and "type" in kinds[0]
    return kinds[0] if alone and not kinds[0].keys() & {"enum", "const"} else None
