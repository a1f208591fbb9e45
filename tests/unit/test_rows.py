"""Rows: what they print, and what their seals are over."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import fields

from safepoint import rows
from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import (
    BranchRow,
    CallRow,
    CallWrite,
    CheckpointRow,
    Commit,
    Grant,
    Guard,
    Head,
    Image,
    Numbers,
    PauseRow,
    PauseWrite,
    TaskRow,
    all_fit,
    fitting,
    replace,
    torn,
)
from safepoint.stores.sqlite import _Look

CANARY = "k4nari-no-log-may-show-this"
NAMES = {"task", "id", "branch", "space", "kind", "tool", "effect", "status", "state", "stamp", "previous"}
NAMES |= {"what", "where", "why"}  # of Lost: places in a store and the store's own words
"""Fields of text that may be printed: names of things, words of the library's own, and nothing that an agent said."""

CLASSES: list[Any] = [
    c for c in vars(rows).values() if isinstance(c, type) and issubclass(c, msgspec.Struct) and c.__module__ == rows.__name__
]


def filled(cls, text):
    """An instance whose fields of text and bytes all hold ``text``, but for those that may be printed."""
    given: dict[str, Any] = {}
    for f in fields(cls):
        kind = getattr(f.type, "__name__", None) or str(f.type)
        if f.name in NAMES or (cls is BranchRow and f.name == "name"):
            given[f.name] = "name"
        elif kind.startswith("bytes"):
            given[f.name] = text.encode()
        elif kind.startswith("str"):
            given[f.name] = text
        elif kind.startswith("int"):
            given[f.name] = 7
        elif kind == "Guard":
            given[f.name] = Guard(7, text)
        elif "Head" in kind:
            given[f.name] = Head(7, "id")
        elif f.required:
            made: dict[str, Any] = {
                "row": lambda: filled({CallWrite: CallRow, Image: TaskRow}.get(cls, PauseRow), text),
                "numbers": Numbers,
                **dict.fromkeys(("branches", "checkpoints"), tuple),
                "seqs": tuple,
                "key": int,
                "existed": bool,
            }
            given[f.name] = made[f.name]()
    return cls(**given)


def test_all_rows_are_looked_at():
    assert {CallRow, CheckpointRow, PauseRow, Commit, Grant, CallWrite, PauseWrite} <= set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_no_row_prints_what_it_holds(cls):
    if cls.__name__.startswith("_"):
        return
    shown = repr(filled(cls, CANARY))
    assert CANARY not in shown
    assert "b'" not in shown
    assert cls.__name__ in shown
    assert len(shown) < 200


def test_a_commit_prints_neither_objects_nor_rows_nor_its_guards_token():
    call, pause = filled(CallRow, CANARY), filled(PauseRow, CANARY)
    commit = replace(
        filled(Commit, CANARY),
        guard=Guard(3, CANARY),
        checkpoint=filled(CheckpointRow, CANARY),
        objects=(Obj(b"n" * 16, b"", CANARY.encode()),),
        calls=(CallWrite(call),),
        pauses=(PauseWrite(pause),),
    )
    for thing in (commit, commit.objects, commit.guard, commit.calls, commit.pauses, Grant(Guard(3, CANARY), "", 0, CANARY)):
        assert CANARY not in repr(thing)
        assert CANARY not in f"{thing}"
    assert repr(call) == "<CallRow no=7 line=7 step=7 tool='name' effect='name' status='name' attempts=7 version=7>"
    assert repr(Guard(3, CANARY)) == "<Guard fence=3>"


def test_what_the_sqlite_store_reads_of_a_lease_prints_no_token():
    assert CANARY not in repr(_Look._make([CANARY] * len(_Look._fields))).replace(f"n={CANARY}", "")


@pytest.mark.parametrize("cls", [CallRow, PauseRow, CheckpointRow])
def test_a_seal_is_over_every_field_and_the_task(cls):
    row = filled(cls, "x").sealed("task")
    row.check("task", "row")
    with pytest.raises(Damaged):
        row.check("other task", "row")
    for f in fields(cls):
        if f.name in cls.UNSEALED - {"seal"}:
            continue
        value = getattr(row, f.name)
        other = value + type(value)(b"y" if isinstance(value, bytes) else "y" if isinstance(value, str) else 1)
        if isinstance(value, bool):
            other = not value
        with pytest.raises(Damaged):
            replace(row, **{f.name: other}).check("task", "row")


def test_a_row_with_a_value_of_another_class_fits_no_more_and_has_no_seal():
    names = tuple(f.name for f in fields(CheckpointRow))
    row = filled(CheckpointRow, "x").sealed("task")
    found = tuple(getattr(row, name) for name in names)
    assert fitting(CheckpointRow, names)(found)
    assert all_fit(CheckpointRow, names, [found, found])
    assert all_fit(CheckpointRow, names, [])
    assert not fitting(CheckpointRow, names)(found[:-1])
    for i, name in enumerate(names):
        for other in (0.5, float("nan"), [], object()):
            wrong = (*found[:i], other, *found[i + 1 :])
            assert not fitting(CheckpointRow, names)(wrong), (name, other)
            assert not all_fit(CheckpointRow, names, [found, wrong])
            made = torn(CheckpointRow, names, wrong)
            assert fitting(CheckpointRow, names)(tuple(getattr(made, n) for n in names))
            with pytest.raises(Damaged):
                made.check("task", "row")
            if name not in CheckpointRow.UNSEALED - {"seal"}:
                with pytest.raises(Damaged):
                    replace(row, **{name: other}).check("task", "row")
    assert fitting(CheckpointRow, ("pinned",))((1,)), "a store keeps a truth value as a number"
    at = names.index("pinned")
    assert torn(CheckpointRow, names, (*found[:at], "no", *found[at + 1 :])).pinned is True
