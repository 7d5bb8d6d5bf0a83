"""Forbids system calls to an untrusted program with a kernel filter (seccomp(2)) that survives exec.

The filter refuses calls with which a program could escape its limits: its own user namespace, in which it could mount
in-memory file systems, and memory that belongs to no process (memfd, System V, sockets with large buffers). It also
refuses interfaces that such programs do not need and that often had vulnerabilities.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct

from grpo.processes.lifetime import LINUX

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_CLONE_NEWUSER = 0x10000000

# Numbers from linux/audit.h and from each architecture's system-call table.
_ARCHITECTURES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            **{"clone": 56, "unshare": 272, "setns": 308, "memfd_create": 319, "shmget": 29, "msgget": 68},
            **{"semget": 64, "socket": 41, "socketpair": 53, "setsockopt": 54},
            **{"bpf": 321, "userfaultfd": 323, "perf_event_open": 298, "add_key": 248, "request_key": 249},
            **{"keyctl": 250},
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            **{"clone": 220, "unshare": 97, "setns": 268, "memfd_create": 279, "shmget": 194, "msgget": 186},
            **{"semget": 190, "socket": 198, "socketpair": 199, "setsockopt": 208},
            **{"bpf": 280, "userfaultfd": 282, "perf_event_open": 241, "add_key": 217, "request_key": 218},
            **{"keyctl": 219},
        },
    ),
}
_EVERYWHERE = {"io_uring_setup": 425, "memfd_secret": 447}
_CLONE3 = 435
_X32 = 0x40000000
"""From this number on, x86-64 repeats its system calls, for programs with 32-bit pointers (x32)."""

# Instructions of the kernel's classic BPF, and offsets into its struct seccomp_data.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32)
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000

_Lines = list[tuple[int, int, int, int]]


def supported() -> bool:
    """Whether this kernel can filter system calls and we know their numbers."""
    if not LINUX or platform.machine() not in _ARCHITECTURES:
        return False
    library = ctypes.CDLL(None, use_errno=True)
    # Without a program it always fails; if the kernel has no filters, with EINVAL.
    library.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def restrict() -> None:
    """Filters all further system calls of this process and its children. The process must have no_new_privs."""
    program = _program(platform.machine())
    memory = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    given = Filter(len(program) // 8, ctypes.addressof(memory))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(given), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp: the filter was refused")


def _program(machine: str) -> bytes:
    """The filter as instructions of 8 bytes: code, jumps if true and if false, operand."""
    architecture, numbers = _ARCHITECTURES[machine]
    partly = ("clone", "socket", "socketpair", "setsockopt")
    refused = [number for name, number in (numbers | _EVERYWHERE).items() if name not in partly]
    no_such_call, not_permitted = _ERROR | errno.ENOSYS, _ERROR | errno.EPERM
    lines: _Lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, no_such_call)]
    lines += [(_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, no_such_call)]
    # clone3's flags are in memory, which a filter cannot read. A C library without clone3 falls back to clone.
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, no_such_call)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, not_permitted)]
    for name in ("socket", "socketpair"):
        lines += _for_call(numbers[name], _local_or_internet())
    lines += _for_call(numbers["setsockopt"], _keeps_send_buffer())
    lines += _for_call(numbers["clone"], _no_user_namespace())
    lines += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _for_call(number: int, lines: _Lines) -> _Lines:
    """Lines that are skipped unless the system call has this number."""
    return [(_EQUAL, 0, len(lines), number), *lines]


def _no_user_namespace() -> _Lines:
    refusal = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    return [(_LOAD, 0, 0, _ARGUMENTS[0]), (_ANY_BIT, 0, 1, _CLONE_NEWUSER), refusal, (_RETURN, 0, 0, _ALLOW)]


def _local_or_internet() -> _Lines:
    """Other families, such as netlink and alg, have buffers and code in the kernel that programs do not need."""
    families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    allowed = [(_EQUAL, len(families) - place, 0, family) for place, family in enumerate(families)]
    unsupported = _ERROR | errno.EAFNOSUPPORT
    return [(_LOAD, 0, 0, _ARGUMENTS[0]), *allowed, (_RETURN, 0, 0, unsupported), (_RETURN, 0, 0, _ALLOW)]


def _keeps_send_buffer() -> _Lines:
    """The supervisor counts each local socket as the buffer that it has by default."""
    return [
        (_LOAD, 0, 0, _ARGUMENTS[1]),
        (_EQUAL, 0, 3, socket.SOL_SOCKET),
        (_LOAD, 0, 0, _ARGUMENTS[2]),
        (_EQUAL, 0, 1, socket.SO_SNDBUF),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
