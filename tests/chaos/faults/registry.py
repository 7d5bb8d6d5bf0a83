"""The register of kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.trial import Ended, Trial

Act = Callable[[Trial], Ended]


@dataclass(frozen=True)
class Fault:
    """A named kind of fault: the stages that it may hit, the templates that it starts from, and what it does. `needs`
    are programs without which it is left out; `own_server`: the run starts its own Prefect server."""

    name: str
    targets: tuple[str, ...]
    act: Act
    template: str = "before"
    needs: tuple[str, ...] = ()
    own_server: bool = False

    def choose(self, chance: random.Random) -> tuple[str, str]:
        """Target and template of one try."""
        target = chance.choice(self.targets)
        return target, self.template if self.template == "done" else f"{self.template}-{target}"


KINDS: dict[str, Fault] = {}


def fault(
    name: str, *targets: str, template: str = "before", needs: tuple[str, ...] = (), own_server: bool = False
) -> Callable[[Act], Act]:
    """Registers the decorated function as a kind."""

    def register(act: Act) -> Act:
        assert name not in KINDS
        KINDS[name] = Fault(name, targets, act, template, needs, own_server)
        return act

    return register
