"""The stored format: a store that was written once is read for ever, and what is written does not change unnoticed.

``SAFEPOINT_WRITE_GOLDEN=1`` writes the files that are not there, and never one that is. A new format gets files of its own.
"""

import json
import os
from typing import Any

import pytest

import safepoint
from safepoint.codec import states
from safepoint.codec.states import Control
from safepoint.rows import replace
from safepoint.rules import journal
from safepoint.stores import sqlite_schema
from tests.support import golden, samples
from tests.support.paths import ROOT

GOLDEN = ROOT / "tests" / "golden"
BYTES = GOLDEN / "format-1.json"
SCHEMAS = range(1, sqlite_schema.SCHEMA + 1)


def written(path, make) -> str:
    # Of a store: only one of today's schema can be made, so that of an earlier one must be there.
    if not path.exists() and os.environ.get("SAFEPOINT_WRITE_GOLDEN"):
        with open(path, "x", encoding="utf-8") as file:
            file.write(make())
    return str(path.read_text(encoding="utf-8"))


@pytest.fixture(params=SCHEMAS)
def schema(request):
    return request.param


@pytest.fixture
def cp(tmp_path, schema):
    """Today's code on a copy of the store that was written then."""

    def make() -> str:
        golden.write(tmp_path / "new.db")
        with golden.opened(tmp_path / "new.db") as cp:
            text = json.dumps(golden.facts(cp), indent=1) + "\n"
        written(GOLDEN / f"store-{schema}.json", lambda: text)
        return golden.dump(tmp_path / "new.db")

    golden.load(written(GOLDEN / f"store-{schema}.sql", make), tmp_path / "agent.db")
    golden.sent.clear()
    with golden.opened(tmp_path / "agent.db") as cp:
        yield cp


def test_digests_and_seals_are_as_they_were(cp, schema):
    assert json.loads(json.dumps(golden.facts(cp))) == json.loads((GOLDEN / f"store-{schema}.json").read_text())
    for row in cp.store.tasks():
        for kept in (*cp.store.calls(row.task)[0], *cp.store.pauses(row.task)):
            kept.check(row.task, "row")
        for checkpoint in cp.list_checkpoints(row.task):
            cp.load(row.task, seq=checkpoint.seq)
    assert [f for f in cp.check() if f.level == "error"] == []


def test_every_state_comes_back_in_type_and_value(cp):
    for seq, n in golden.SIZES.items():
        state, want = cp.load("history", seq=seq), golden.history(n)
        for part in ("messages", "agent_state", "metadata", "step"):
            assert samples.same(getattr(state, part), getattr(want, part)), (seq, part)
    heads = cp.list_checkpoints("history")
    assert [(c.seq, c.branch, c.kind, c.parent_seq) for c in heads] == [
        (5, "main", "failure", 3),
        (4, "side", "edit", 2),
        (3, "main", "manual", 2),
        (2, "main", "milestone", 1),
        (1, "main", "manual", None),
    ]
    assert [c.pinned for c in heads] == [False] * 4 + [True]
    assert [c.label for c in heads] == ["with 150", "with 80", "with 150", "with 80", "with 40"]
    assert cp.load_latest("history").seq == 3
    assert cp.load("history", branch="side").messages == golden.messages(80)


def test_the_same_state_has_the_same_digest_and_is_stored_once(cp):
    before = cp.store.live_objects("history")
    state = cp.load_latest("history")
    state.messages.append("one more")
    assert cp.save(state).seq == 6
    assert cp.store.live_objects("history") - before < 6
    state.messages.pop()
    again = cp.save(state)
    assert again.digest == cp.list_checkpoints("history", before=6, branch="main")[1].digest
    assert cp.cleanup("history", keep_latest=1, keep_milestones=False, keep_failures=0).deleted == (3, 5, 6)
    assert cp.load_latest("history").messages == golden.messages(150)


def test_calls_of_each_status_come_back(cp):
    calls = cp.calls("journal")
    assert tuple(c.status for c in calls) == golden.CALL_STATUSES
    assert {json.dumps(c.arguments) for c in calls} == {json.dumps({"to": "bob", "body": "x" * 100})}
    assert [c.result for c in calls if c.status == "succeeded"] == [["succeeded", 1.5]]
    pauses = cp.pauses("journal", status=None)
    assert [(p.status, p.question, p.answer) for p in pauses] == [
        ("open", "?", None),
        ("answered", "?", True),
        ("used", "?", True),
    ]
    doubt = next(c for c in calls if c.status == "in_doubt")
    assert cp.resolve("journal", doubt, safepoint.NotDone()).status == "failed"
    assert cp.status("journal").pending == 1


def test_an_interrupted_task_goes_on_without_doing_it_again(cp):
    assert [t.task_id for t in cp.tasks(status="unfinished")] == ["interrupted"]
    out = safepoint.run_agent(golden.step, task_id="interrupted", store=cp)
    assert out.status == "waiting"
    cp.answer("interrupted", "approve", "yes")
    out = safepoint.run_agent(golden.step, task_id="interrupted", store=cp)
    assert (out.result, out.state.messages[-1]["content"]) == ("approved", "sent to bob")
    assert golden.sent == []


def test_a_waiting_task_takes_its_answer_and_a_finished_one_its_outcome(cp):
    cp.answer("waiting", "approve", "yes")
    assert safepoint.run_agent(golden.step, task_id="waiting", store=cp).result == "approved"
    assert safepoint.run_agent(golden.step, task_id="finished", input="do it", store=cp).result == "approved"
    assert golden.sent == []
    lease = cp.store.lease("finished")
    assert (lease.state, lease.fence) == ("released", 2)


def test_a_deleted_tasks_fence_does_not_come_again(cp):
    with cp.resume("deleted") as run:
        assert run.fence == 2


# -- what is written


def todays_bytes() -> dict[str, Any]:
    packed = states.pack_state(golden.history(400), Control([["", "the job", "open", None, 0]]), samples.REGISTRY, None)
    objects = sorted(packed.new, key=lambda o: o.name)
    of_kind = {kind: next(o for o in objects if o.data[:1] == kind) for kind in (b"v", b"l", b"i", b"r")}
    call, _ = golden.call_row("succeeded", 7)
    call = replace(call, no=4, began=8, ended=9, version=2)
    arguments = {"to": "bob", "n": [1, 2.0, None, True, "é", b"\0", {"k": -(2**70)}]}
    return {
        "format": states.FORMAT,
        "root": packed.data.hex(),
        "root refs": packed.refs.hex(),
        "digest": packed.digest.hex(),
        "size": packed.size,
        "objects": len(objects),
        "all names": states.chunks.name_of(b"".join(o.name for o in objects), b"").hex(),
        **{
            f"{name} {part}": getattr(of_kind[kind], part).hex()
            for name, kind in (("value", b"v"), ("leaf page", b"l"), ("index page", b"i"), ("list root", b"r"))
            for part in ("name", "refs", "data")
        },
        "checkpoint seal": golden.checkpoint_row().sealed("task").seal.hex(),
        "call seal": call.sealed("task").seal.hex(),
        "pause seal": replace(golden.pause_row("answered", 7), no=3, version=2).sealed("task").seal.hex(),
        "canonical": journal.canonical(arguments).hex(),
        "identity": journal.ident_of("golden.send", journal.canonical(arguments)).hex(),
    }


def test_what_is_written_is_what_was_written():
    stored = json.loads(written(BYTES, lambda: json.dumps(todays_bytes(), indent=1) + "\n"))
    today = todays_bytes()
    assert today.keys() == stored.keys()
    changed = [name for name in stored if stored[name] != today[name]]
    assert not changed, "stored by an earlier version in another way: a new format needs a new number, and the old one read"
