"""Who holds a lease: the map that is stored with it, shown to people, and asked whether its process is only stopped."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime
from functools import cache
from typing import Any

import msgspec

from safepoint.errors import LeaseHeld
from safepoint.model import from_us

__all__ = ["boot_id", "describe", "is_local", "is_stopped", "lease_held", "read"]

# The state letters of a stopped and of a traced process in /proc/<pid>/stat.
_STOPPED = (b"T", b"t")


@cache
def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def describe(program: str | None = None, **more: Any) -> bytes:
    """Return this process as MessagePack, for ``Store.acquire``."""
    return msgspec.msgpack.encode(
        {
            "pid": os.getpid(),
            "host": platform.node(),
            "boot_id": boot_id(),
            "pid_ns": _pid_namespace(),
            "program": os.path.basename(sys.argv[0] if sys.argv else "") if program is None else program,
            **more,
        }
    )


def read(holder: bytes) -> dict[str, Any]:
    """Return the map, or an empty one if these bytes are none: it is for people, and nothing is decided by it."""
    try:
        value = msgspec.msgpack.decode(holder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def is_local(holder: dict[str, Any]) -> bool:
    """Whether the holder's pid means the same process here: same boot of the same host, same pid namespace."""
    return bool(
        holder.get("boot_id")
        and holder.get("boot_id") == boot_id()
        and holder.get("host") == platform.node()
        and holder.get("pid_ns") == _pid_namespace()
    )


def is_stopped(holder: dict[str, Any]) -> bool:
    """Whether the holder's process is stopped (SIGSTOP, a debugger). False where that cannot be seen."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or not is_local(holder):
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The name of the program stands in brackets and may hold anything, brackets too.
            return f.read().rpartition(b") ")[2][:1] in _STOPPED
    except OSError:
        return False


def lease_held(task: str, holder: bytes, acquired_at: int) -> LeaseHeld:
    """Return the error that says who holds a task, since when, and whether it is stopped."""
    who = read(holder)
    stopped = is_stopped(who)
    since = _since(acquired_at)
    text = f"pid {who.get('pid', '?')} on {who.get('host', '?')} holds it since {since}"
    if stopped:
        text += " and is stopped"
    remedy = "Wait for it to end, or stop it; steal=True takes the task from it by force"
    if stopped:
        remedy = f"Let it go on (kill -CONT {who['pid']}) or end it (kill -9 {who['pid']}); steal=True takes the task from it"
    return LeaseHeld(
        f"a live run holds task {task!r}", text, remedy + ".", task=task, holder=who, since=acquired_at, stopped=stopped
    )


def _since(us: int) -> str:
    try:
        moment: datetime = from_us(us)
    except OverflowError:
        return "?"
    return moment.isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")
