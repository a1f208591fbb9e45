"""Whether a Redis or Valkey server, or each node of a cluster, is fit to keep tasks: a real write and read, and how it is set up.

What ``CONFIG`` would tell is told by ``INFO`` too, as far as it goes, since managed servers often permit only that.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from safepoint.errors import SafepointError, Unavailable
from safepoint.model import Finding

if TYPE_CHECKING:
    from safepoint.stores.redis.client import Client

__all__ = ["Node", "Refused", "check", "write_and_read"]

OLDEST = (6, 2)
SKEW = 2.0
"""Seconds between the server's clock and this host's beyond which times that are shown to people mislead them."""
FULL = 0.9
"""Of ``maxmemory``: from there on it may be too late to clean up, as writes are refused at 1."""


class Node(NamedTuple):
    """A server that is asked by itself."""

    name: str
    """Where it is; '' if there is only one."""
    ask: Callable[..., Any]
    """Sends one command and gives the raw answer; raises a SafepointError, or Refused where the server refuses."""


class Refused(Exception):
    """The server answered with an error."""


def check(
    nodes: Iterable[Node], write_and_read: Callable[[], None], *, full: bool, wait_replicas: int = 0, cluster: bool = False
) -> list[Finding]:
    """Look at every node that takes writes.

    Args:
        write_and_read: Writes something in the way that tasks are written, reads it back, and removes it.
        full: The store promises that what it acknowledged outlives a loss of power.
        cluster: The store speaks to a cluster, and knows it.
    """
    found = [_write_and_read(write_and_read)]
    for node in nodes:
        try:
            found += _look(node, full, wait_replicas, cluster)
        except (SafepointError, Refused) as error:
            remedy = error.remedy if isinstance(error, SafepointError) else "See the log of the server."
            found.append(Finding("server", "error", _at(node, f"it cannot be looked at: {error}"), remedy))
    return found


def write_and_read(client: Client) -> None:
    """As tasks are written, under a key that no task has and that no listing shows, and that expires if this is killed."""
    word = secrets.token_hex(8).encode()
    key = b"%s{check-%s}" % (client.keys.prefix, word)
    client.write("check", [key, key + b":f"], [word])
    found = client.command("HGET", key, "word")
    client.command("UNLINK", key)
    if found != word:
        raise Unavailable(f"{client.name} does not give back what was written", f"it gave {found!r}", "Look at the server.")


def _at(node: Node, text: str) -> str:
    return f"{node.name}: {text}" if node.name else text


def _write_and_read(write_and_read: Callable[[], None]) -> Finding:
    try:
        write_and_read()
    except SafepointError as error:
        return Finding("write", "error", f"a write did not succeed: {error.what}: {error.why}", error.remedy)
    except Refused as error:
        return Finding("write", "error", f"a write was refused: {error}", "See the log of the server.")
    return Finding("write", "ok", "a write was made and read back")


def _look(node: Node, full: bool, wait_replicas: int, cluster: bool) -> list[Finding]:
    # Everything at once, as Redis 6 knows no list of sections.
    info = _pairs(node.ask("INFO"), ":")
    config = _config(node)
    looks = [
        _version(info),
        _role(info),
        _eviction(info, config),
        _persistence(info, config, full),
        _memory(info),
        *_replicas(info, wait_replicas),
        _clock(node),
    ]
    if config is None:
        text = "CONFIG GET is not permitted: what it would tell (appendfsync, save) could not be looked at"
        looks.append(Finding("config", "warning", text, "ACL SETUSER <user> +config|get, or look at redis.conf yourself."))
    if info.get("cluster_enabled") == "1" or cluster:
        looks.append(_cluster(node, info, cluster))
    return [Finding(f.name, f.level, _at(node, f.text), f.remedy) for f in looks]


def _pairs(raw: Any, mark: str) -> dict[str, str]:
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
    lines = (line.partition(mark) for line in text.splitlines() if not line.startswith("#"))
    return {name.strip(): value.strip() for name, found, value in lines if found}


def _config(node: Node) -> Mapping[str, str] | None:
    """What is set; None if it is not permitted to look."""
    found: dict[str, str] = {}
    for name in ("maxmemory-policy", "appendonly", "appendfsync", "save"):
        try:
            raw = node.ask("CONFIG", "GET", name)
        except Refused:
            return None
        flat = [x for pair in raw.items() for x in pair] if isinstance(raw, dict) else list(raw)
        texts = [x.decode("utf-8", "replace") if isinstance(x, bytes) else str(x) for x in flat]
        found |= dict(zip(texts[::2], texts[1::2], strict=False))
    return found


def _number(info: Mapping[str, str], name: str) -> int:
    try:
        return int(info.get(name, "0"))
    except ValueError:
        return 0


def _version(info: Mapping[str, str]) -> Finding:
    version = info.get("redis_version", "?")
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    parts = version.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        return Finding("server", "warning", f"its version is not known ({version})", "Use Redis 6.2 or newer, or Valkey.")
    if (int(parts[0]), int(parts[1])) < OLDEST:
        return Finding("server", "error", f"{name} is too old", "Use Redis 6.2 or newer, or Valkey.")
    return Finding("server", "ok", name)


def _role(info: Mapping[str, str]) -> Finding:
    if info.get("role") != "master":
        of = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        return Finding("role", "error", f"this is a replica of {of}: it takes no writes", "Connect to its primary.")
    return Finding("role", "ok", "it takes writes")


def _eviction(info: Mapping[str, str], config: Mapping[str, str] | None) -> Finding:
    policy = (config or {}).get("maxmemory-policy") or info.get("maxmemory_policy", "?")
    if policy == "noeviction":
        return Finding("eviction", "ok", "nothing is evicted")
    remedy = "CONFIG SET maxmemory-policy noeviction, and set it in redis.conf."
    if not _number(info, "maxmemory"):
        text = f"maxmemory-policy is {policy}: as soon as a maxmemory is set, whole tasks are dropped when it is reached"
        return Finding("eviction", "warning", text, remedy)
    return Finding("eviction", "error", f"maxmemory-policy is {policy}: whole tasks are dropped when memory is short", remedy)


def _persistence(info: Mapping[str, str], config: Mapping[str, str] | None, full: bool) -> Finding:
    """What is kept when the server ends. ``appendfsync`` and ``save`` are told by CONFIG alone."""
    name = "persistence"
    if info.get("aof_enabled") == "1":
        if info.get("aof_last_write_status", "ok") != "ok":
            return Finding(
                name, "error", "the last write to the append-only file failed", "See the log of the server; free its disk."
            )
        fsync = (config or {}).get("appendfsync")
        if fsync == "always":
            return Finding(name, "ok", "an append-only file, synced at every write")
        if not full:
            return Finding(name, "ok", f"an append-only file{f', appendfsync {fsync}' if fsync else ''}")
        remedy = "CONFIG SET appendfsync always, and set it in redis.conf; or open the store with durability=process."
        if fsync is None:
            text = "an append-only file; whether it is synced at every write is not known, and durability is full"
            return Finding(name, "warning", text, remedy)
        lost = "the last second" if fsync == "everysec" else "what the system has not written yet"
        return Finding(name, "warning", f"durability is full, and appendfsync {fsync} loses {lost} with the power", remedy)
    remedy = "CONFIG SET appendonly yes and appendfsync always, and set both in redis.conf."
    save = (config or {}).get("save")
    if save == "" or (config is None and not _number(info, "rdb_saves") and info.get("rdb_last_bgsave_time_sec", "-1") == "-1"):
        known = "" if save == "" else ", as far as can be seen"
        return Finding(
            name, "error", f"neither append-only file nor snapshots{known}: all is gone when the server ends", remedy
        )
    text = "snapshots only: what was saved since the last one is gone when the server ends"
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        return Finding(name, "error", f"{text}; and the last one failed", remedy)
    return Finding(name, "warning", text, remedy)


def _memory(info: Mapping[str, str]) -> Finding:
    used, most = _number(info, "used_memory"), _number(info, "maxmemory")
    text = f"{used / 1e6:,.0f} MB used"
    if most:
        text += f" of {most / 1e6:,.0f} MB"
        if used > FULL * most:
            return Finding(
                "memory", "warning", text, "Raise maxmemory, clean up tasks, or save elsewhere: full, it refuses saves."
            )
        return Finding("memory", "ok", text)
    system = _number(info, "total_system_memory")
    if system and used > FULL * system:
        return Finding(
            "memory", "warning", f"{text} of the {system / 1e6:,.0f} MB of its host", "Clean up tasks, or give it more."
        )
    return Finding("memory", "ok", f"{text}, without a maxmemory")


def _replicas(info: Mapping[str, str], wanted: int) -> list[Finding]:
    if info.get("role") != "master":
        return []
    at = _number(info, "master_repl_offset")
    behind: list[int] = []
    for i in range(_number(info, "connected_slaves")):
        fields = dict(part.partition("=")[::2] for part in info.get(f"slave{i}", "").split(","))
        if fields.get("state") == "online" and fields.get("offset", "").isdigit():
            behind.append(max(0, at - int(fields["offset"])))
    n = len(behind)
    text = f"{n} replica{'s' if n != 1 else ''} connected"
    if behind:
        text += f", the furthest {max(behind):,} bytes behind"
    if wanted > n:
        # Nothing is acknowledged there: each save waits for its timeout, and its outcome is Unavailable.
        remedy = f"Connect {wanted} replicas, or open the store with wait_replicas={n}."
        return [Finding("replicas", "error", f"{text}, and wait_replicas={wanted}: no save can be acknowledged", remedy)]
    if n and not wanted:
        text += ": a failover loses what they have not received yet, though it was acknowledged"
        return [Finding("replicas", "warning", text, "Open the store with wait_replicas=1: then a save waits for one of them.")]
    return [Finding("replicas", "ok", text)]


def _clock(node: Node) -> Finding:
    """The server's time less that of this host, by the fastest of a few answers: it was given within that trip."""
    best: tuple[float, float] | None = None
    for _ in range(5):
        sent, began = time.time(), time.perf_counter()
        seconds, micros = (int(part) for part in node.ask("TIME"))
        trip = time.perf_counter() - began
        if best is None or trip < best[0]:
            best = trip, seconds + micros / 1e6 - sent - trip / 2
    assert best is not None
    trip, skew = best
    if abs(skew) - trip / 2 > SKEW:
        text = f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this host's"
        return Finding("clock", "warning", f"{text}; leases go by its clock alone", "Set both by NTP.")
    return Finding("clock", "ok", f"within {max(abs(skew), 0.001):.3f} s of this host's")


def _cluster(node: Node, info: Mapping[str, str], known: bool) -> Finding:
    if info.get("cluster_enabled") != "1":
        return Finding("cluster", "error", "it is no node of a cluster", "Open the store without cluster=true.")
    if not known:
        return Finding(
            "cluster", "error", "it is a node of a cluster, and is used as a single server", "Open the store with cluster=true."
        )
    state = _pairs(node.ask("CLUSTER", "INFO"), ":")
    slots = _number(state, "cluster_slots_ok")
    if state.get("cluster_state") != "ok" or slots < 16384:
        text = f"the cluster's state is {state.get('cluster_state', '?')}: {slots} of 16384 slots are served"
        return Finding(
            "cluster", "error", text, "Bring its missing nodes back: tasks in other slots cannot be read or written."
        )
    return Finding("cluster", "ok", f"all slots are served, by {state.get('cluster_size', '?')} nodes")
