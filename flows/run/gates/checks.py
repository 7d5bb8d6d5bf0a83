"""Which gates of a recipe apply to a run, and whether each can be read where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flows.stages import evaluate
from grpo.errors import InputError
from tasks.gates.conditions import Gate


def check_gates(gates: Iterable[Gate], stages: Sequence[str], approve: Sequence[str]) -> list[Gate]:
    """The gates that apply to a flow with these stages: those that read no stage of another flow.

    Raises:
        InputError: a gate cannot be read at its position, or `approve` names a gate that does not exist or does not
            ask.
    """
    here = {gate.name: gate for gate in gates if gate.stages() <= set(stages)}
    known = evaluate.checkpoints(stages)
    for name in approve:
        if name not in here:
            raise InputError(f"--approve {name}: no such gate; there are {', '.join(here) or 'none'}")
        if here[name].on_failure != "ask" and here[name].review is None:
            raise InputError(f"--approve {name}: this gate does not ask; set its on_failure to 'ask', or change it")
    for gate in here.values():
        so_far = stages[: stages.index(gate.after) + 1]
        for stage in sorted(gate.stages()):
            if stage not in so_far:
                raise InputError(
                    f"gate {gate.name!r} looks at {stage}, which runs after the gate; compare earlier stages"
                )
        for stage in sorted(gate.stages("evaluation") | gate.stages("table")):
            if stage not in known:
                raise InputError(
                    f"gate {gate.name!r}: {stage} makes no checkpoint to evaluate; these do: {', '.join(known)}"
                )
    return [*here.values()]
