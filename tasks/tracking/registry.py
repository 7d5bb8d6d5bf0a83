"""MLflow's model registry: one registered model a recipe, a version each checkpoint, aliases for those that matter.

Weights stay in the store. An alias leads to a version, its tag `sha256` to the artifact: what `models:/` downloads for
such a version is an empty folder.
"""

from __future__ import annotations

from typing import Any

from grpo.errors import InputError
from tasks.store.store import Manifest, Store
from tasks.tracking.client import Tracking
from tasks.tracking.names import alias_name, registered_name

CHAMPION = "champion"


def by_alias(alias: str, recipe: str | None, tracking: Tracking, store: Store) -> Manifest:
    """The checkpoint that `alias` of a recipe's registered model leads to.

    Raises:
        InputError: if no recipe has this alias, several have it and none is named, or its artifact is gone.
    """
    found = tracking.ask(lambda client: _versions(client, alias_name(alias)))
    if recipe is not None:
        found = {name: version for name, version in found.items() if name == registered_name(recipe)}
    shown = f"{alias}@{recipe}" if recipe else alias
    if not found:
        raise InputError(f"{shown}: no registered model has this alias; `r1 promote REF --alias {alias}` sets it")
    if len(found) > 1:
        raise InputError(f"{alias}: {len(found)} recipes have it; write {' or '.join(f'{alias}@{r}' for r in found)}")
    tags = next(iter(found.values())).tags
    manifest = next((m for m in reversed(store.list()) if m.digest == tags["sha256"]), None)
    if manifest is None:
        raise InputError(f"{shown}: its artifact is not in {store.root}; it was made as {tags['uri']}")
    return manifest


def recipes_with(manifest: Manifest, tracking: Tracking) -> list[str]:
    """The registered models that have this checkpoint as a version."""

    def ask(client: Any) -> list[str]:
        return sorted({v.name for v in client.search_model_versions(f"tags.sha256 = '{manifest.digest}'")})

    return tracking.ask(ask)


def _versions(client: Any, alias: str) -> dict[str, Any]:
    named = [model for model in client.search_registered_models() if alias in model.aliases]
    return {model.name: client.get_model_version_by_alias(model.name, alias) for model in named}
