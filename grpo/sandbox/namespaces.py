"""Linux namespaces (unshare(2)): a process tree, a network and a file system for one program.

These functions change the calling process, which must have no threads and will soon exec something else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat

from grpo.processes.lifetime import prctl

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture; Linux 5.12
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 0x1, 0x2
_PR_SET_DUMPABLE = 4

WORK = "/tmp"
"""Where a program may write inside its private root."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/tmp")
_BLOCK = 4096
_INSIDE_ID = 1000


def unshare(own_user: bool, own_files: bool) -> None:
    """Unshares processes (for children), network and IPC. Without root privileges this needs a user namespace."""
    user, group = os.geteuid(), os.getegid()
    flags = _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | (_NEWUSER if own_user else 0) | (_NEWNS if own_files else 0)
    _call("unshare", flags)
    if own_user:
        # Any id but 0: a program run under it has no privileges even inside, because exec drops them all.
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{_INSIDE_ID} {user} 1"),
            ("gid_map", f"{_INSIDE_ID} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)


def become(user: int) -> None:
    """Changes root to `user` permanently; children may still use /proc/self."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    prctl(_PR_SET_DUMPABLE, 1)


def hide_memory() -> None:
    """Prevents other processes of the same user from reading our memory and environment."""
    prctl(_PR_SET_DUMPABLE, 0)


def unused_user() -> int:
    """A user id that owns nothing, and differs between concurrent sandboxes if there are enough ids."""
    user = 0x70000000 + os.getpid()  # process ids end below 2^22
    with contextlib.suppress(FileNotFoundError), open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
        if any(first <= user < first + count for first, _, count in ranges):
            return user
    return 60_000 + os.getpid() % 5_000  # a container with 65,536 ids


def private_root(needed: list[str], disk_bytes: int, owner: int | None) -> None:
    """Replaces the file system with a read-only one that has the system's programs, the folders `needed`, and `WORK`.

    `WORK` is in memory, holds at most `disk_bytes` bytes or disk_bytes / 4096 files, and belongs to user `owner`.
    """
    sources = [path for path in (*_SYSTEM, *_ETC) if os.path.lexists(path)]
    sources += [path for path in needed if not any(_within(path, known) for known in sources)]
    root = next(p for p in _MOUNT_POINTS if os.path.isdir(p) and not any(_within(s, p) for s in sources))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=4m")
    for path in (*sources, *_DEVICES):
        _show(path, root + path)
    for path in (WORK, "/proc", "/dev/shm"):
        os.makedirs(root + path, exist_ok=True)
    _read_only(root)
    limits = f"mode=700,size={disk_bytes},nr_inodes={max(disk_bytes // _BLOCK, 16)}"
    _mount("tmpfs", root + WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, limits)
    if owner is not None:
        os.chown(root + WORK, owner, owner)
    _mount(root + WORK, root + "/dev/shm", None, _MS_BIND)  # so that shared memory counts towards the same limit
    with contextlib.suppress(OSError):  # a container may forbid it; programs rarely need it
        _mount("proc", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(WORK)


def full() -> bool:
    """Whether `WORK` has no space for another block or file."""
    state = os.statvfs(WORK)
    return state.f_bavail == 0 or state.f_favail == 0


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _show(source: str, target: str) -> None:
    """Makes `source` visible as `target`; a symbolic link is copied."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    mode = os.lstat(source).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
        return
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT))
    _mount(source, target, None, _MS_BIND | _MS_REC)


def _read_only(path: str) -> None:
    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    attributes = Attributes(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    _call(
        "syscall",
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        _AT_FDCWD,
        os.fsencode(path),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    text = [value.encode() if value is not None else None for value in (source, target, kind)]
    _call("mount", *text, ctypes.c_ulong(flags), options.encode() or None)


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
