"""Programs that a sandbox must survive, and how each must end. Needs no more than the standard library.

Run as a script it tries the named ones with the means of the given kind, and prints how each ended as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from grpo.sandbox.run import Limits, Means, _candidates, run

MIB = 1 << 20
SMALL = Limits(wall_s=20.0, cpu_s=15, memory_bytes=400 * MIB, processes=20, disk_bytes=8 * MIB, output_bytes=100_000)


@dataclass(frozen=True)
class Hostile:
    kind: str
    program: str
    limits: Limits = SMALL


PROGRAMS = {
    "sleeps": Hostile("timeout", "import time; time.sleep(1000)", Limits(wall_s=0.5)),
    "spins": Hostile("timeout", "while True: pass", Limits(wall_s=20.0, cpu_s=1)),
    "ignores being out of time": Hostile(
        "timeout",
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        Limits(wall_s=20.0, cpu_s=1),
    ),
    "fork bomb": Hostile("processes", "import os\nwhile True: os.fork()"),
    "patient fork bomb": Hostile(
        "processes", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", SMALL
    ),
    "thread bomb": Hostile(
        "processes",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
    ),
    "fills memory": Hostile("memory", "hoard = []\nwhile True: hoard.append(bytearray(10_000_000))"),
    # Ten times 100 MB: no process breaks the 400 MiB alone.
    "fills memory together": Hostile(
        "memory",
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        hoard = b'x' * 100_000_000\n"
        "        time.sleep(100)\ntime.sleep(100)",
    ),
    "fills shared memory together": Hostile(
        "memory",
        "import mmap, os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        m = mmap.mmap(-1, 100_000_000)\n"
        "        for _ in range(100): m.write(b'x' * 1_000_000)\n        time.sleep(100)\ntime.sleep(100)",
    ),
    # Twelve times 124 sockets with about 280 kB each: 400 MB that belong to no process.
    "fills sockets together": Hostile(
        "memory",
        "import os, socket, time\nfor _ in range(12):\n    if os.fork() == 0: break\nheld = []\ntry:\n    while True:\n"
        "        held += socket.socketpair()\nexcept OSError: pass\nfor end in held:\n    end.setblocking(False)\n"
        "    try:\n        while True: end.send(bytes(100_000))\n    except BlockingIOError: pass\ntime.sleep(100)",
    ),
    "writes a large file": Hostile(
        "disk", "with open('large', 'wb') as file:\n    while True: file.write(bytes(1_000_000))"
    ),
    "writes many files and never gives up": Hostile(
        "disk",
        "import itertools, os\nos.mkdir('many')\nfor i in itertools.count():\n"
        "    try: open(f'many/{i}', 'w').close()\n    except OSError: pass",
    ),
    "buries its files": Hostile(
        "disk",
        "import os\nwhile True:\n    os.mkdir('deep'); os.chmod('deep', 0o700); os.chdir('deep')\n    open('f', 'w')",
    ),
    "prints without end": Hostile("output", "while True: print('line')"),
    "complains without end": Hostile("output", "import sys\nwhile True: print('line', file=sys.stderr)"),
    "crashes": Hostile("crash", "import ctypes; ctypes.string_at(0)"),
    "kills itself": Hostile("crash", "import os; os.kill(os.getpid(), 9)"),
    "leaves a daemon": Hostile(
        "ok",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n"
        "    os._exit(0)\nos.wait()\nprint('left')",
    ),
    "locks its folders": Hostile(
        "error",
        "import os\nos.makedirs('a/b'); open('a/b/c', 'w'); os.symlink('/', 'a/root')\n"
        "os.chmod('a/b', 0); os.chmod('a', 0); raise SystemExit(3)",
    ),
    "kills all it can": Hostile(
        "ok", "import os\nfor pid in (os.getppid(), -1):\n    try: os.kill(pid, 9)\n    except OSError: pass"
    ),
    "kills its parent": Hostile(
        "ok", "import os, time\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\ntime.sleep(0.5)"
    ),
}


def means_of_kind(kind: str) -> Means:
    """ "strongest", "user namespace", "user namespace and our files" or "no namespaces"."""
    own_user, own_files = {
        "strongest": (None, True),
        "user namespace": (True, True),
        "user namespace, our files": (True, False),
        "no namespaces": (False, False),
    }[kind]
    for means in _candidates():
        fits = means.own_user == own_user or own_user is None
        if fits and means.own_files == own_files and means.namespaces == (kind != "no namespaces"):
            try:
                if run("", "", SMALL, means).kind == "ok":
                    return means
            except RuntimeError:
                continue
    raise LookupError(kind)


if __name__ == "__main__":
    means = means_of_kind(sys.argv[1])
    results = {}
    for name in sys.argv[2:]:
        result = run(PROGRAMS[name].program, "", PROGRAMS[name].limits, means)
        results[name] = [result.kind, result.stderr[-200:]]
    print(json.dumps(results))
