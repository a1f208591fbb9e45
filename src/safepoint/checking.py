"""Arguments of the public verbs: each refusal names the verb, what is wrong, and what to pass instead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from safepoint.codec.registry import Registry
from safepoint.errors import UsageError
from safepoint.model import Retention, State, a_type
from safepoint.rules.health import checks
from safepoint.stores.base import Store
from safepoint.stores.url import open_store

OPEN_OPTIONS = (
    "retention", "types", "trust", "schema_version", "migrations", "durability", "lease", "redact", "state_type", "health", "timeout",
)  # fmt: skip


def _wrong(option: str, wanted: str, value: object) -> UsageError:
    return UsageError(f"open({option}=) must be {wanted}", f"it is {a_type(value)}", "Correct it; nothing was opened.")


def registry_of(types: Iterable[type], trust: Iterable[str]) -> Registry:
    if isinstance(types, type) or not isinstance(types, Iterable):
        name = f": types=[{types.__name__}]" if isinstance(types, type) else ""
        raise UsageError("open(types=) must be a list of classes", "it is one class" if name else "", f"Write it as one{name}.")
    if not isinstance(trust, Iterable):
        raise _wrong("trust", "a list of names of modules", trust)
    return Registry(types, trust)


def checked_options(**given: Any) -> dict[str, Any]:
    """The options of a checkpointer, each of the type that it must have."""
    retention, migrations, lease = given["retention"], given["migrations"], given["lease"]
    if retention is not None and not isinstance(retention, Retention):
        raise _wrong("retention", "a Retention, as in Retention(keep_latest=10)", retention)
    if migrations is not None:
        if not isinstance(migrations, Mapping):
            raise _wrong("migrations", "a mapping from a schema's number to the function that leads on from it", migrations)
        for number, step in migrations.items():
            if type(number) is not int or not callable(step):
                raise UsageError(
                    "open(migrations=) must lead from numbers to functions",
                    f"it leads from {a_type(number)} to {a_type(step)}",
                    "Write it as {1: from_1_to_2}.",
                )
    if lease is not None and (isinstance(lease, bool) or not isinstance(lease, int | float)):
        raise _wrong("lease", "a number of seconds", lease)
    if lease is not None and not 0 < lease < math.inf:
        raise UsageError("open(lease=) must be longer than 0 seconds", "", "Leave it at the default of 30.")
    if given["state_type"] is not None and not isinstance(given["state_type"], type):
        raise _wrong("state_type", "a class", given["state_type"])
    if type(given["schema_version"]) is not int or not 1 <= given["schema_version"] < 1 << 63:
        raise UsageError("open(schema_version=) must be an int of at least 1", "", "Number your schemas 1, 2, 3 …")
    given["health"] = checks(given["health"], "open(health=)")
    return given


def none_beside(**given: Any) -> None:
    """Refuse options for a checkpointer that is open: they would be ignored."""
    if beside := [name for name, value in given.items() if value]:
        raise UsageError(
            f"open takes no {', '.join(beside)} beside a checkpointer",
            "it is open already, with options of its own",
            "Give them where it is opened.",
        )


def store_of(verb: str, where: object) -> tuple[Store, bool]:
    """The store that a verb was given as a URL, a store or a checkpointer; and whether it was opened here, and is to be closed."""
    if isinstance(where, str):
        return open_store(where), True
    where = getattr(where, "sync", where)  # of an AsyncCheckpointer
    store = where if isinstance(where, Store) else getattr(where, "store", None)
    if not isinstance(store, Store):
        raise UsageError(
            f"{verb} was given no store", f"it was given {a_type(where)}", "Pass a URL, a store or a checkpointer."
        )
    return store, False


def needs_state(verb: str, state: object) -> None:
    if not isinstance(state, State):
        raise UsageError(f"{verb} takes a State", f"it was given {a_type(state)}", "Pass State(task_id=…, …).")


def check_number(verb: str, name: str, value: object) -> None:
    """Refuse what is no number of a checkpoint, call or pause: those begin at 1."""
    if type(value) is not int or value < 1:
        shown = value if type(value) is int else a_type(value)
        raise UsageError(
            f"{verb}({name}=) must be an int of at least 1", f"it is {shown}", "Pass a number as the listings show it."
        )


def check_limit(verb: str, value: object) -> None:
    if value is not None and (type(value) is not int or value < 0):
        shown = value if type(value) is int else a_type(value)
        raise UsageError(f"{verb}(limit=) must be None or an int of at least 0", f"it is {shown}", "Leave it out for all.")
