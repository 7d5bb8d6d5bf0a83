"""Servers that fail: an endpoint that judges and samples, and Prefect's and MLflow's servers behind a proxy."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.chaos.endpoint import ChaosEndpoint, answer
from tests.chaos.faults.registry import fault
from tests.chaos.proxy import Proxy
from tests.chaos.servers import Server
from tests.chaos.trial import Ended, Trial
from tests.support.faulty_endpoint import FAULTS

DATA, SFT, ASKED = "cold_start_data", "cold_start_sft", "sft_data"


def at_endpoint(trial: Trial, names: tuple[str, ...], share: float, asked: str) -> Ended:
    """A share of the requests of one side gets one of these faults; the endpoint is well when the run is over."""
    faulty = True

    def plan(number: int, body: dict[str, Any]) -> str | None:
        content = body["messages"][-1]["content"]
        mine = asked == ("judge" if "Reply with one" in content else "engine")
        return trial.chance.choice(names) if faulty and mine and trial.chance.random() < share else answer(number, body)

    server = ChaosEndpoint(plan)
    trial.closing.append(server.close)
    with trial.running() as command:
        pass
    faulty = False
    trial.struck = any(server.served[name] for name in names)
    return command.wait()


GROUPS = {
    "fails": ("500", "503", "429", "408", "429 wait"),
    "hangs": ("hang", "drip", "drip of headers"),
    "answers garbage": ("truncated", "truncated json", "html", "deep json", "not http", "list", "no choices"),
    "drops connections": ("closed", "reset"),
}
for side in ("engine", "judge"):
    for group, members in GROUPS.items():
        assert set(members) <= FAULTS.keys()
        share = 0.02 if group == "hangs" else 0.1
        fault(f"{side} endpoint {group} now and then", ASKED)(
            partial(at_endpoint, names=members, share=share, asked=side)
        )
    fault(f"{side} endpoint fails always", ASKED)(
        partial(at_endpoint, names=tuple(name for of in GROUPS.values() for name in of), share=1.0, asked=side)
    )


def with_server(trial: Trial, name: str, harm: Callable[[Trial, Server, Proxy], object]) -> Ended:
    """The command with a server of this name behind a proxy; `harm` happens at a seeded moment."""
    server = Server(name, trial.homes.home, trial.homes.home / "logs" / f"{name}-chaos.log")
    trial.closing.append(server.stop)
    trial.keeps = True  # the rerun has the same server: what was begun there is to be found again
    proxy = Proxy(server.port)
    trial.closing.append(proxy.close)
    trial.extra = {
        "prefect": {"PREFECT_API_URL": f"http://127.0.0.1:{proxy.port}/api"},
        "mlflow": {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{proxy.port}"},
    }[name]
    with trial.running() as command:
        trial.moment(command, 8.0)
        if command.process.poll() is None:
            harm(trial, server, proxy)
    trial.struck = proxy.disturbed > 0
    trial.notes.append(f"{proxy.disturbed} requests disturbed")
    trial.undo.append(proxy.heal)
    return command.wait()


def restarted(trial: Trial, server: Server, proxy: Proxy) -> None:
    """Killed, away for a while, started again."""
    proxy.mode = "away"
    server.stop()
    time.sleep(trial.chance.uniform(0, 3))
    server.start()
    proxy.mode = "pass"


def stopped(trial: Trial, server: Server, proxy: Proxy) -> None:
    """SIGSTOP for a while."""
    proxy.mode = "away"
    server.signal(signal.SIGSTOP)
    time.sleep(trial.chance.uniform(1, 6))
    server.signal(signal.SIGCONT)
    proxy.mode = "pass"


def partitioned(trial: Trial, server: Server, proxy: Proxy) -> None:
    """Connections are refused or swallowed for a while, and open ones cut."""
    proxy.mode = trial.chance.choice(["refuse", "swallow"])
    proxy.cut()
    time.sleep(trial.chance.uniform(1, 6))
    proxy.mode = "pass"
    proxy.cut()


def flaky(trial: Trial, server: Server, proxy: Proxy) -> None:
    """One connection in ten is cut, to the end of the run."""
    proxy.lossy(trial.chance, 0.1)


for name, called in {"prefect": "Prefect server", "mlflow": "MLflow server"}.items():
    for what, harm in {
        "is killed and started again": restarted,
        "is stopped for seconds (SIGSTOP)": stopped,
        "is cut off for seconds (proxy)": partitioned,
        "loses one connection in ten (proxy)": flaky,
    }.items():
        fault(f"{called} {what}", DATA, SFT)(partial(with_server, name=name, harm=harm))
