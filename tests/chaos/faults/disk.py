"""Stores that are full, read-only, slow or failing: a tmpfs in a mount namespace, or calls that strace alters."""

from __future__ import annotations

import os
import subprocess
import time
from functools import partial
from pathlib import Path

from tests.chaos.faults.registry import fault
from tests.chaos.trial import Ended, Trial

DATA, SFT, RL = "cold_start_data", "cold_start_sft", "reasoning_rl"
NAMESPACE = ("unshare", "nsenter")
LARGE = "200m"


def in_small_disk(trial: Trial, size: int) -> subprocess.Popen[bytes]:
    """Move the home to a tmpfs of `size` bytes in a mount namespace, and have commands run there. Returns the process
    that holds the namespace."""
    home, copy = trial.homes.home, trial.homes.folder / "outside"
    subprocess.run(["rm", "-rf", copy], check=True)
    home.rename(copy)
    home.mkdir()
    script = 'mount -t tmpfs -o size="$1" chaos "$2" && cp -a "$3/." "$2" && echo ready && exec sleep 100000'
    holder = subprocess.Popen(
        ["unshare", "-Urm", "sh", "-c", script, "sh", str(size), str(home), str(copy)], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"ready\n", "no tmpfs in a user namespace here"
    trial.closing.append(partial(_end, holder))
    trial.seen_home = Path(f"/proc/{holder.pid}/root{home}")
    trial.prefix = ["nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials"]
    trial.keeps = True
    return holder


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()


def remount(trial: Trial, options: str) -> None:
    """Change the options of the tmpfs."""
    subprocess.run([*trial.prefix, "mount", "-o", f"remount,{options}", str(trial.homes.home)], check=True)


def used(trial: Trial) -> int:
    """Bytes that the home takes in a tmpfs, whose files fill whole pages."""
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in trial.homes.home.rglob("*") if p.is_file())


def full(trial: Trial, spare: int) -> Ended:
    """The home has room for a seeded number of bytes, up to `spare`."""
    free = trial.chance.randrange(spare)
    trial.notes.append(f"{free} bytes free")
    in_small_disk(trial, used(trial) + free)
    trial.undo.append(partial(remount, trial, f"size={LARGE}"))
    with trial.running() as command:
        while command.process.poll() is None:
            if not os.statvfs(trial.home).f_bavail:  # a write that did not fit took what was left
                trial.struck = True
            time.sleep(0.01)
    return command.wait()


fault("disk full in a stage without a trainer", DATA, needs=NAMESPACE, own_server=True)(partial(full, spare=1_500_000))
fault("disk full in training", SFT, RL, needs=NAMESPACE)(partial(full, spare=6_000_000))
fault("disk full in resumed training", SFT, RL, template="half", needs=NAMESPACE)(partial(full, spare=5_000_000))


@fault("disk fills up in training", SFT, RL, needs=NAMESPACE)
def fills_up(trial: Trial) -> Ended:
    """Room for everything at first; the rest is taken at a seeded moment."""
    in_small_disk(trial, used(trial) + 50_000_000)
    trial.undo.append(partial(remount, trial, f"size={LARGE}"))
    with trial.running() as command:
        if trial.find(command, "trainer") is not None:
            trial.moment(command, 6.0)
            ballast = trial.home / "ballast"
            try:
                with ballast.open("wb") as file:
                    while True:
                        file.write(bytes(65536))
            except OSError:
                trial.struck = command.process.poll() is None
            trial.undo.append(partial(ballast.unlink, missing_ok=True))
    return command.wait()


@fault("read-only home", DATA, SFT, needs=NAMESPACE, own_server=True)
def read_only(trial: Trial) -> Ended:
    in_small_disk(trial, used(trial) + 50_000_000)
    remount(trial, "ro")
    trial.undo.append(partial(remount, trial, "rw"))
    return trial.whole()


@fault("slow store", DATA, SFT, needs=("strace",))
def slow(trial: Trial) -> Ended:
    """Every fsync and rename takes 50 ms to 300 ms longer."""
    delay = trial.chance.randrange(50_000, 300_000)
    calls = "fsync,fdatasync,rename,renameat,renameat2"
    return altered(trial, calls, f"delay_enter={delay}")


@fault("fsync that fails", DATA, SFT, needs=("strace",))
def failing_fsync(trial: Trial) -> Ended:
    """EIO from every fsync from a seeded one on, in the process that calls it, as of a disk that dies."""
    first = trial.chance.randrange(1, 12)
    trial.notes.append(f"from fsync {first} on")
    return altered(trial, "fsync", f"error=EIO:when={first}+")


def altered(trial: Trial, calls: str, how: str) -> Ended:
    """The command below an strace that alters calls, and marks them in its log."""
    log = trial.homes.folder / "strace.log"
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:{how}"]
    trial.prefix = ["strace", "-f", "--seccomp-bpf", "-o", str(log), *inject]
    ended = trial.whole()
    said = log.read_text(errors="replace")
    trial.struck = "(DELAYED)" in said or "(INJECTED)" in said
    return ended
