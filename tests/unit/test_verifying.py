"""What verify concludes from the parts of a task: pure, without a store."""

from typing import Any

import pytest

from safepoint.codec import chunks
from safepoint.codec.registry import Registry
from safepoint.errors import NewerFormat
from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Head, Lost, Numbers, TaskRow, replace
from safepoint.rules.mending import mend
from safepoint.rules.verifying import Audit, Damage, Ranges, spans
from safepoint.testing.build import call_row, pause_row


def checkpoint(seq, value, **fields):
    """A row whose state is ``value``, and its objects."""
    packed = chunks.pack(value, Registry())
    row = CheckpointRow(
        id=f"id-{seq}",
        seq=seq,
        parent_seq=seq - 1 or None,
        step=seq,
        kind="step",
        created_at=1,
        format=1,
        schema=1,
        size=packed.size,
        digest=packed.digest,
        root=packed.data,
        refs=packed.refs,
    )
    return replace(row, **fields).sealed("t"), packed.new


def text(n):
    return f"{n} " + "x" * 1000


def task(n=5, *, calls=(), branch=None):
    """Parts of a task whose state grows by one value each checkpoint."""
    rows: list[Any] = []
    objects: dict[bytes, Obj] = {}
    for seq in range(1, n + 1):
        row, new = checkpoint(seq, {f"k{i}": text(i) for i in range(seq)})
        rows.append(row)
        objects |= {o.name: o for o in new}
    head = branch or BranchRow("", "main", Head(n, f"id-{n}"), 1)
    numbers = Numbers(seq=n, call=len(calls), line=1, position=len(calls))
    return [numbers, TaskRow(task="t"), head, *rows, *calls, *sorted(objects.values())]


def audited(parts, **options):
    audit = Audit("t", lambda kind, key: f"at {kind}")
    for part in parts:
        audit.take(part)
    if audit.again(**options):
        for part in parts:
            if not audit.retake(part):
                break
    audit.finish()
    return audit


def of_text(parts, n):
    """The object that holds a text."""
    return next(p for p in parts if isinstance(p, Obj) and text(n).encode() in p.data)


def without(parts, one):
    return [p for p in parts if p is not one]


def instead(parts, one, other):
    return [other if p is one else p for p in parts]


def test_nothing_is_wrong():
    audit = audited(task())
    assert audit.damages == []
    assert audit.notes == []
    assert audit.good_heads() == [("", 5)]


def test_no_second_look_where_nothing_is_wrong():
    audit = Audit("t")
    for part in task():
        audit.take(part)
    assert not audit.again()
    assert audit.again(branches=True)


def test_a_missing_object():
    parts = task()
    (damage,) = audited(without(parts, of_text(parts, 2))).damages
    assert (damage.kind, damage.why, damage.where) == ("object", "it is missing", "at object")
    assert damage.checkpoints == ((3, 5),)


def test_a_changed_object():
    parts = task()
    one = of_text(parts, 0)
    audit = audited(instead(parts, one, one._replace(data=one.data + b"!")))
    (damage,) = audit.damages
    assert (damage.why, damage.checkpoints) == ("its bytes have changed", ((1, 5),))
    assert audit.good_heads() == []
    (report,) = audit.branches()
    assert (report.head_loads, report.loads, report.newest_good) == (False, (), None)


def test_a_page_in_between():
    """A damaged object deep down takes what reaches it through others."""
    whole = chunks.pack({"messages": [text(i) for i in range(200)]}, Registry())
    row, objects = checkpoint(1, {"messages": [text(i) for i in range(200)]})
    assert any(o.refs for o in whole.new)
    deep = next(o for o in objects if not o.refs)
    parts = [
        Numbers(seq=1),
        TaskRow(task="t"),
        BranchRow("", "main", Head(1, "id-1"), 1),
        row,
        *(o for o in objects if o is not deep),
    ]
    (damage,) = audited(parts).damages
    assert damage.key == deep.name
    assert damage.checkpoints == ((1, 1),)


def test_what_nothing_reaches_is_a_note():
    parts = task()
    garbage = Obj(chunks.name_of(b"", b"garbage"), b"", b"garbage")
    audit = audited([*parts, garbage])
    assert audit.damages == []
    assert "1 objects that nothing reaches" in audit.notes[0].text


def test_rows_that_went_between_two_looks_are_no_damage():
    parts = task()
    audit = Audit("t")
    one = of_text(parts, 4)
    for part in without(parts, one):
        audit.take(part)
    assert audit.again()
    for part in parts:
        if not (isinstance(part, CheckpointRow) and part.seq == 5) and not audit.retake(part):
            break
    audit.finish(lambda damage: damage.kind != "branch")
    assert audit.damages == []


@pytest.mark.parametrize("change", [{"step": 9}, {"root": b"\x80"}, {"refs": b"x" * 16}, {"seal": b""}, {"metadata": b"?"}])
def test_a_changed_row(change):
    parts = task()
    row = parts[5]
    assert row.seq == 3
    audit = audited(instead(parts, row, replace(row, **change)))
    (damage,) = [d for d in audit.damages if d.kind == "checkpoint"]
    assert (damage.what, damage.checkpoints) == ("checkpoint 3", ((3, 3),))
    (report,) = audit.branches()
    assert report.loads == ((1, 2), (4, 5))


def test_a_row_that_is_no_row():
    parts = task()
    audit = audited(instead(parts, parts[5], replace(parts[5], id=7)))
    assert [d.what for d in audit.damages] == ["checkpoint 3"]


def test_a_newer_format_is_a_note():
    parts = task()
    audit = audited(instead(parts, parts[5], replace(parts[5], format=99)))
    assert audit.damages == []
    assert "checkpoint 3" in str(audit.notes[0])
    with pytest.raises(NewerFormat):
        mend(audit, lambda: parts, 1)


def test_calls_and_pauses():
    calls = [replace(call_row(1), no=n).sealed("t") for n in (1, 2)]
    pause = replace(pause_row(1), no=1).sealed("t")
    parts = [*task(calls=calls), pause]
    audit = audited(instead(instead(parts, calls[1], replace(calls[1], status="failed")), pause, replace(pause, name="other")))
    assert [(d.kind, d.key) for d in audit.damages] == [("call", 2), ("pause", 1)]
    assert audit.damages[0].calls == ((2, 2),)
    assert audit.lost_calls


def test_a_question_that_cannot_be_read():
    pause = replace(pause_row(1, question=b"\xc1"), no=1).sealed("t")
    (damage,) = audited([*task(), pause]).damages
    assert damage.what == "pause 1"


@pytest.mark.parametrize(
    "branch",
    [
        BranchRow("", "main", Head(9, "id-9"), 1),
        BranchRow("", "main", Head(5, "id-other"), 1),
        BranchRow("", "other", Head(5, "id-5"), 1),
    ],
)
def test_a_head_that_is_not_there(branch):
    audit = audited(task(branch=branch))
    assert {d.kind for d in audit.damages} == {"branch"}


def test_what_the_store_could_not_read():
    parts = task()
    parts.remove(parts[5])
    lost = Lost("checkpoint 3", "page 7", "cut off", kind="checkpoint", first=3, last=3)
    audit = audited([*parts[:5], lost, *parts[5:]])
    (damage,) = audit.damages
    assert (damage.what, damage.where, damage.why, damage.checkpoints) == ("checkpoint 3", "page 7", "cut off", ((3, 3),))
    assert audit.branches()[0].loads == ((1, 2), (4, 5))


def test_words():
    assert spans([(1, 3), (5, 5)]) == "1-3, 5"
    assert list(Ranges([1, 2, 5])) == [1, 2, 5]
    assert len(Ranges([1, 2, 5])) == 3
    damage = Damage("t", "object 00", "row 1", "it is missing", "object", ((1, 2),), ((4, 4),))
    assert str(damage) == "t: object 00: it is missing (row 1); takes checkpoints 1-2 and calls 4 with it"


# -- mending


def mended(parts):
    return mend(audited(parts, branches=True), lambda: parts, 1_000)


def test_a_sound_task_is_not_changed():
    parts = task()
    found = mended(parts)
    assert found.fell_back == []
    assert list(found.image.checkpoints) == [p for p in parts if isinstance(p, CheckpointRow)]
    assert found.image.branches == (parts[2],)
    assert set(found.image.objects) == {p for p in parts if isinstance(p, Obj)}


def test_a_lost_head_falls_back():
    parts = task()
    found = mended(without(parts, of_text(parts, 3)))
    (fell,) = found.fell_back
    assert (fell.branch, fell.new_branch, fell.lost_head, fell.seq, fell.guard) == ("main", "main~1", 5, 3, 0)
    assert [row.seq for row in found.image.checkpoints] == [1, 2, 3, 6]
    new = found.image.checkpoints[-1]
    assert (new.branch, new.parent_seq, new.digest) == ("main~1", 3, found.image.checkpoints[2].digest)
    assert {b.name: b.head.seq for b in found.image.branches} == {"main": 3, "main~1": 6}
    assert found.image.row.branch == "main~1"
    assert found.image.numbers.seq == 6
    assert list(found.checkpoints) == [4, 5]


def test_lost_calls_put_a_guard_on_the_current_branch():
    calls = [replace(call_row(1, step=5), no=1).sealed("t")]
    parts = task(calls=calls)
    found = mended(instead(parts, calls[0], replace(calls[0], status="failed")))
    (fell,) = found.fell_back
    assert (fell.lost_head, fell.seq, fell.new_branch) == (None, 5, "main~1")
    assert fell.guard == 6
    assert found.image.calls == ()


def test_a_write_without_its_values_stays_a_write():
    from safepoint.codec import chunks as codec

    packed = codec.pack({"to": text(77)}, Registry(), opened=False)
    call = replace(call_row(1, args=packed.data, args_refs=packed.refs, status="succeeded"), no=1).sealed("t")
    look = replace(call, no=2, effect="read").sealed("t")
    parts = task(calls=[call, look])
    found = mended(parts)
    assert packed.new
    (bare,) = found.image.calls
    assert isinstance(bare, CallRow)
    assert (bare.no, bare.status, bare.result, bare.ident) == (1, "succeeded", None, call.ident)
    assert list(found.bare_calls) == [1]
    assert list(found.calls) == [2]
    assert found.fell_back == []
