"""A Hypothesis machine that does to a store whatever may be done to it, and compares with plain dicts.

No rule has a precondition and none draws from what the store answered: after a real kill it depends on the clock what is
found, and Hypothesis can only shrink and repeat what does not change which draws are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from safepoint.errors import SafepointError
from safepoint.model import new_id
from safepoint.rows import CallWrite, Commit, Guard, Head, PauseWrite, TaskPatch, replace
from safepoint.testing.adapting import Adapting
from safepoint.testing.build import call_row, checkpoint_row, flat, obj, pause_row
from safepoint.testing.draws import CALL_STATUSES, TASKS, branches, contents, picks, spaces, steps, tasks
from safepoint.testing.drive import Driver, Killed, end_processes
from safepoint.testing.oracle import Oracle, as_dict

__all__ = ["StoreMachine", "run_machine"]


class StoreMachine(Adapting, RuleBasedStateMachine):
    """Subclass it with a ``driver`` that opens an empty store at each call, and give it to ``run_machine``."""

    reached: ClassVar[Counter[str]] = Counter()
    ALWAYS: ClassVar[frozenset[str]] = frozenset(
        {
            *("first commit", "commit", "new branch", "failure leaf", "repeat", "id taken", "stale commit", "held", "anyway"),
            *("guarded commit", "lost guard", "intent", "result", "stale row", "row not there", "gone", "question"),
            *("answer", "second answer", "acquire", "acquire refused", "steal", "release", "release by others", "abandon"),
            *("pin", "prune", "kept for a resume", "dry run", "delete", "delete refused", "read", "absent", "listing", "calls"),
            *(
                "tasks",
                "patch",
                "at head",
                "not at head",
                "write",
                "write left out",
                "write replaced",
                "write of an unborn one",
            ),
            *("write gone", "writes", "set back", "dropped", "current kept", "branch moved"),
        }
    )
    CHUNKED: ClassVar[frozenset[str]] = frozenset({"left out"})
    chunked: ClassVar[bool] = True
    """Whether the store is; set it to what the store's class says."""
    PERSISTENT: ClassVar[frozenset[str]] = frozenset({"reopen", "crash", "crash in a commit", "whole", "not there"})

    def driver(self) -> Driver:
        raise NotImplementedError(f"{type(self).__name__} gives no driver")

    @initialize(start=st.integers(0, 5), calls=st.integers(0, 2))
    def begin(self, start: int, calls: int) -> None:
        self.ask: Driver = self.driver()
        self.oracle = Oracle()
        self.sent: list[Commit] = []
        self.guards: dict[str, list[tuple[Guard, Any]]] = {name: [] for name in TASKS}
        self.told: dict[str, list[Head]] = {name: [] for name in TASKS}
        self.lives = 5 if self.ask.can_crash else 0
        # Most of what can go wrong needs some history, which the rules by themselves are slow to make.
        for i in range(start):
            assert self._commit(self._checkpoint(TASKS[0], "", "main", {i})) == "ok"
        for i in range(min(start, 2)):
            self._write(TASKS[0], "", i, {i + 6})
        for i in range(calls if start else 0):
            self._intend(TASKS[0], i, ("succeeded", "started")[i % 2], 1, {i}, False)

    def teardown(self) -> None:
        if hasattr(self, "ask"):
            try:
                for name in TASKS:
                    self.oracle.verify(self.ask, name)
            finally:
                self.ask.close()

    def hit(self, what: str) -> None:
        type(self).reached[what] += 1

    # -- commits

    def _head(self, name: str, space: str, branch: str) -> Head | None:
        at = self.oracle.tasks.get(name, {}).get("branches", {}).get((space, branch))
        return Head(*at["head"]) if at else None

    def _guard(self, name: str) -> Guard | None:
        """The live run's guard, if there is one."""
        mine = [g for g, _ in self.guards[name] if self.oracle.owns(name, g)]
        return mine[-1] if mine else None

    def _things(self, content: set[int]) -> list[Any]:
        """A page over some leaves, a page over that page, and the leaves; the oracle learns of them.

        For a store that keeps no objects, one alone, for its name to be part of the state.
        """
        if not self.chunked:
            return [obj(b"%r" % sorted(content))]
        leaves = [obj(b"leaf\0%d" % i) for i in sorted(content)]
        page = obj(b"page", *leaves)
        found = [obj(b"top", page), page, *leaves]
        self.oracle.world.update((o.name, (o.refs, o.data)) for o in found)
        return found

    def _row(self, id: str, top: list[Any], **fields: Any) -> Any:
        row = checkpoint_row(id, top, **fields)
        return row if self.chunked else flat(row)

    def _sent(self, things: Any) -> tuple[Any, ...]:
        return tuple(things) if self.chunked else ()

    def _checkpoint(
        self,
        name: str,
        space: str,
        branch: str,
        content: set[int],
        *,
        whole: bool = True,
        fork: int = 0,
        step: int = 0,
        **fields: Any,
    ) -> Commit:
        head = self._head(name, space, branch)
        known = self.oracle.tasks.get(name, {}).get("checkpoints", {})
        parent = head.seq if head else sorted(known)[fork % len(known)] if fork and known else None
        things = self._things(content)
        there: dict[bytes, Any] = {} if whole or head is None else self.oracle.reach(known[head.seq]["refs"])
        given: dict[str, Any] = {"guard": self._guard(name), "expect": head}
        given |= {"objects": self._sent(o for o in things if o.name not in there), **fields}
        kind = "step" if given.get("moves_head", True) else "failure"
        row = self._row(new_id(), things[:1], space=space, branch=branch, parent_seq=parent, kind=kind, step=step)
        if there:
            self.hit("left out")
        return Commit(task=name, id=row.id, checkpoint=row, **given)

    def _commit(self, c: Commit) -> str:
        """Send a commit, compare its end with what it must be, and say how it ended."""
        want = self.oracle.judge(c)
        if not want:
            return "open"
        done, refusal = self._try("commit", c)
        if refusal:
            assert refusal in want, f"{refusal} instead of {want}"
            return refusal
        if done.existed:
            assert "existed" in want, f"existed instead of {want}"
            if c.checkpoint is None:
                there = self.oracle.tasks[c.task]
                assert [there["calls"][row.no] for row in done.calls] == [as_dict(row) for row in done.calls]
                assert [there["pauses"][row.no] for row in done.pauses] == [as_dict(row) for row in done.pauses]
                assert (len(done.calls), len(done.pauses)) == (len(c.calls), len(c.pauses))
        else:
            assert want == {"ok"}, f"it landed instead of {want}"
            self._landed(c, done.calls, done.pauses)
        if c.checkpoint is not None:
            there = self.oracle.tasks[c.task]["checkpoints"]
            assert there[done.seq]["id"] == c.id
            assert done.head == self._head(c.task, c.checkpoint.space, c.checkpoint.branch)
        return "existed" if done.existed else "ok"

    def _try(self, verb: str, *args: Any, **keywords: Any) -> tuple[Any, str]:
        """A verb's answer, and the name of the error if it refused."""
        try:
            return self.ask(verb, *args, **keywords), ""
        except SafepointError as error:
            return None, type(error).__name__

    def _landed(self, c: Commit, calls: Any, pauses: Any) -> None:
        self.oracle.landed(c, calls, pauses)
        self.sent.append(c)
        if c.checkpoint is not None:
            self.told[c.task].append(Head(self.oracle.tasks[c.task]["seq"], c.id))

    @rule(name=tasks, space=spaces, branch=branches, content=contents, whole=st.booleans(), fork=picks, step=steps)
    def save(self, name: str, space: str, branch: str, content: set[int], whole: bool, fork: int, step: int) -> None:
        new, first = self._head(name, space, branch) is None, name not in self.oracle.tasks
        c = self._checkpoint(name, space, branch, content, whole=whole, fork=fork, step=step)
        if self._commit(c) == "ok":
            self.hit("first commit" if first else "new branch" if new else "guarded commit" if c.guard else "commit")

    @rule(name=tasks, branch=branches, content=contents)
    def fail(self, name: str, branch: str, content: set[int]) -> None:
        c = self._checkpoint(name, "", branch, content, moves_head=False)
        if c.expect is not None and self._commit(c) == "ok":
            self.hit("failure leaf")

    @rule(name=tasks, branch=branches, content=contents, which=picks, wrong_id=st.booleans())
    def save_on_a_stale_head(self, name: str, branch: str, content: set[int], which: int, wrong_id: bool) -> None:
        head, heads = self._head(name, "", branch), self.told[name]
        stale: Head | None = heads[which % len(heads)] if heads and which % 4 else None
        if wrong_id and head is not None:
            stale = Head(head.seq, "another")
        if stale != head and self._commit(self._checkpoint(name, "", branch, content, expect=stale)) == "Conflict":
            self.hit("stale commit")

    @rule(name=tasks, branch=branches, content=contents, anyway=st.booleans())
    def save_without_a_guard(self, name: str, branch: str, content: set[int], anyway: bool) -> None:
        held = self.oracle.is_live(name)
        got = self._commit(self._checkpoint(name, "", branch, content, guard=None, anyway=anyway))
        if held:
            self.hit({"ok": "anyway", "LeaseHeld": "held"}[got])

    @rule(name=tasks, branch=branches, content=contents, which=picks, forged=st.booleans())
    def save_with_another_guard(self, name: str, branch: str, content: set[int], which: int, forged: bool) -> None:
        guards = [g for g, _ in self.guards[name]]
        guard = guards[which % len(guards)] if guards else Guard(1, "x")
        if forged:
            guard = Guard(guard.fence, "0" * 32)
        if self._commit(self._checkpoint(name, "", branch, content, guard=guard)) == "LeaseLost":
            self.hit("lost guard")

    @rule(which=picks, other=st.booleans())
    def repeat(self, which: int, other: bool) -> None:
        """The same commit again, as after an answer that was lost on its way."""
        if not self.sent:
            return
        c = self.sent[-1 - which % min(8, len(self.sent))]
        if c.checkpoint is None and c is not self.sent[-1]:
            return  # only checkpoints are known by their id for as long as they exist
        if c.checkpoint is not None and other:
            c = replace(c, checkpoint=replace(c.checkpoint, digest=b"another digest!!"))
        known = self.oracle.tasks.get(c.task, {}).get("checkpoints", {})
        if c.checkpoint is not None and not any(k["id"] == c.id for k in known.values()):
            return  # deleted since: it would be a new one, whose objects are gone
        self.hit({"existed": "repeat", "UsageError": "id taken"}.get(self._commit(c), "repeat refused"))

    @rule(name=tasks, which=picks, content=contents, branch=st.sampled_from(["b1", "b2"]))
    def fork_from_what_may_be_gone(self, name: str, which: int, content: set[int], branch: str) -> None:
        heads = self.told[name]
        if not heads or self._head(name, "", branch) is not None:
            return
        on = heads[which % len(heads)]
        c = self._checkpoint(name, "", branch, content, stands_on=on)
        assert c.checkpoint is not None
        c = replace(c, checkpoint=replace(c.checkpoint, parent_seq=on.seq))
        if self._commit(c) == "NotFound":
            self.hit("gone")

    # -- the journal

    @rule(
        name=tasks,
        base=picks,
        status=st.sampled_from(CALL_STATUSES),
        count=st.integers(1, 3),
        content=contents,
        with_save=st.booleans(),
        step=steps,
    )
    def intend(self, name: str, base: int, status: str, count: int, content: set[int], with_save: bool, step: int) -> None:
        self._intend(name, base, status, count, content, with_save, step)

    def _intend(self, name: str, base: int, status: str, count: int, content: set[int], with_save: bool, step: int = 0) -> None:
        bases = sorted(self.oracle.tasks.get(name, {}).get("checkpoints", {}))
        if not bases:
            return
        things, guard = self._things(content), self._guard(name)
        fence = guard.fence if guard else 0
        rows = [
            call_row(
                bases[base % len(bases)],
                status=status,
                args_refs=things[0].name if self.chunked else b"",
                args=b"\0args",
                fence=fence,
                line=1 + base % 2,
                step=step,
            )
            for _ in range(count)
        ]
        writes = tuple(CallWrite(row, "began") for row in rows)
        c = Commit(task=name, id=new_id(), guard=guard, objects=self._sent(things), calls=writes)
        if with_save:
            c = self._checkpoint(name, "", "main", content, calls=writes)
        if self._commit(c) == "ok":
            self.hit("intent")

    @rule(
        name=tasks,
        which=picks,
        status=st.sampled_from(CALL_STATUSES),
        content=contents,
        off=st.sampled_from([0, 0, 0, -1, 1]),
        by=st.sampled_from(["run", "person"]),
        absent=st.sampled_from([False, False, False, True]),
    )
    def settle(self, name: str, which: int, status: str, content: set[int], off: int, by: str, absent: bool) -> None:
        known = list(self.oracle.tasks.get(name, {}).get("calls", {}).values())
        if not known:
            return
        old = known[which % len(known)]
        things = self._things(content)
        row = call_row(
            1,
            **{k: v for k, v in old.items() if k != "base_seq"},
        )
        row = replace(
            row, base_seq=old["base_seq"], status=status, result=b"", result_refs=things[0].name if self.chunked else b""
        )
        row = replace(row, version=max(1, old["version"] + off), no=10**6 if absent else old["no"])
        guard = self._guard(name) if by == "run" else None
        write = CallWrite(row, "ended" if by == "run" else "")
        got = self._commit(
            Commit(task=name, id=new_id(), guard=guard, anyway=guard is None, objects=self._sent(things), calls=(write,))
        )
        self.hit({"ok": "result", "Conflict": "stale row", "NotFound": "row not there"}[got])

    @rule(name=tasks, base=picks, step=steps)
    def question(self, name: str, base: int, step: int) -> None:
        bases = sorted(self.oracle.tasks.get(name, {}).get("checkpoints", {}))
        if bases:
            row = pause_row(bases[base % len(bases)], question=b"\0?", step=step)
            c = Commit(task=name, id=new_id(), guard=self._guard(name), pauses=(PauseWrite(row),))
            assert self._commit(c) == "ok"
            self.hit("question")

    @rule(name=tasks, which=picks, use=st.booleans())
    def answer_twice(self, name: str, which: int, use: bool) -> None:
        known = list(self.oracle.tasks.get(name, {}).get("pauses", {}).values())
        if not known:
            return
        old = known[which % len(known)]
        row = replace(pause_row(1), **{**old, "status": "used" if use else "answered", "answer": b"\0!", "seal": b""})
        first, second = (self._commit(Commit(task=name, id=new_id(), anyway=True, pauses=(PauseWrite(row),))) for _ in range(2))
        assert (first, second) == ("ok", "Conflict")
        self.hit("answer")
        self.hit("second answer")

    @rule(name=tasks, branch=branches, status=st.sampled_from(["waiting", "finished"]))
    def patch(self, name: str, branch: str, status: str) -> None:
        here = self._head(name, "", branch) is not None
        patch = TaskPatch(status=status, branch=branch if here else None)
        if self._commit(Commit(task=name, id=new_id(), guard=self._guard(name), patch=patch)) == "ok":
            self.hit("patch")

    @rule(name=tasks, which=picks, last=st.booleans(), anyway=st.booleans())
    def patch_at_head(self, name: str, which: int, last: bool, anyway: bool) -> None:
        heads = self.told[name]
        current = self._head(name, "", self.oracle.tasks.get(name, {}).get("current", "main"))
        on = current if last or not heads else heads[which % len(heads)]
        guard = None if anyway else self._guard(name)
        c = Commit(task=name, id=new_id(), guard=guard, anyway=anyway, patch=TaskPatch(status="finished"), stands_on=on)
        got = self._commit(replace(c, at_head=True))
        if got in {"ok", "Conflict"}:
            self.hit("at head" if got == "ok" else "not at head")

    # -- leases

    @rule(name=tasks, steal=st.booleans())
    def acquire(self, name: str, steal: bool) -> None:
        held = self.oracle.is_live(name)
        grant, refusal = self._try("acquire", name, b"me", steal=steal)
        assert refusal == ("LeaseHeld" if held and not steal else "")
        if refusal:
            self.hit("acquire refused")
            return
        self.oracle.acquired(name, grant)
        self.guards[name].append((grant.guard, grant))
        assert self.ask("holds", name, grant.guard)
        self.hit("steal" if held else "acquire")

    @rule(name=tasks, which=picks, mine=st.booleans(), dies=st.booleans())
    def let_go(self, name: str, which: int, mine: bool, dies: bool) -> None:
        known = self.guards[name]
        if not known:
            return
        guard, grant = known[-1 if mine else which % len(known)]
        owns = self.oracle.owns(name, guard)
        if dies:
            self.ask("abandon", name, grant)
            self.oracle.abandoned(name, guard)
        elif owns or not self._is_dead(name, guard):
            self.ask("release", name, grant, TaskPatch(status="interrupted"))
            self.oracle.released(name, guard, "interrupted")
        self.hit(("abandon" if dies else "release") if owns else "release by others")

    def _is_dead(self, name: str, guard: Guard) -> bool:
        """Whether this is the last holder, let go of and not yet replaced: whether its word still counts is left open."""
        lease = self.oracle.tasks.get(name, {}).get("lease")
        return bool(lease and lease["state"] == "held" and lease["guard"] == tuple(guard))

    # -- removing

    @rule(name=tasks, which=picks, pinned=st.booleans(), space=spaces)
    def pin(self, name: str, which: int, pinned: bool, space: str) -> None:
        known = self.oracle.tasks.get(name, {}).get("checkpoints", {})
        seq = sorted(known)[which % len(known)] if known else 1
        there = seq in known and known[seq]["space"] == space
        assert self.ask("pin", name, seq, pinned, space=space) is there
        if there:
            known[seq]["pinned"] = pinned
            self.hit("pin")

    @rule(name=tasks, which=st.sets(st.integers(0, 15), min_size=1), space=spaces, dry_run=st.booleans())
    def prune(self, name: str, which: set[int], space: str, dry_run: bool) -> None:
        known = sorted(self.oracle.tasks.get(name, {}).get("checkpoints", {}))
        seqs = {known[i % len(known)] for i in which} if known else which
        self.oracle.learn_lines(self.ask, name)
        writes = len(self.oracle.tasks.get(name, {}).get("writes", ()))
        got = self.ask("prune", name, sorted(seqs), space=space, dry_run=dry_run)
        if self.oracle.pruned(name, sorted(seqs), space, dry_run, got):
            self.hit("kept for a resume")
        if got.seqs:
            self.hit("dry run" if dry_run else "prune")
            if len(self.oracle.tasks[name]["writes"]) < writes:
                self.hit("write gone")

    @rule(name=tasks, really=st.integers(0, 3))
    def delete(self, name: str, really: int) -> None:
        if really and not self.oracle.is_live(name):
            return  # a task that lives longer has more to lose
        held = self.oracle.is_live(name)
        there, refusal = self._try("delete_task", name)
        assert refusal == ("LeaseHeld" if held else "")
        if refusal:
            self.hit("delete refused")
            return
        assert there is (name in self.oracle.tasks)
        if self.oracle.deleted(name):
            self.hit("delete")
            # Commits of a life that is over would come back as new ones.
            self.sent = [c for c in self.sent if c.task != name]

    # -- reading

    @rule(name=tasks, space=spaces, branch=branches, seq=st.integers(-1, 40), by=st.sampled_from(["seq", "branch", "id", ""]))
    def read(self, name: str, space: str, branch: str, seq: int, by: str) -> None:
        task = self.oracle.tasks.get(name, {"checkpoints": {}, "current": "main"})
        at = task["checkpoints"].get(seq)
        if by == "seq":
            found = self.ask("read", name, space=space, seq=seq)
        elif by == "id":
            found = self.ask("read", name, space=space, id=at["id"] if at else "none")
        else:
            head = self._head(name, space, branch if by else task["current"])
            at = task["checkpoints"][head.seq] if head else None
            found = self.ask("read", name, space=space, **({"branch": branch} if by else {}))
        want = at if at and at["space"] == space else None
        self.oracle.same_checkpoint(found, name, want)
        self.hit("read" if want else "absent")

    @rule(name=tasks, space=spaces, branch=branches, every=st.booleans(), before=st.integers(0, 40), limit=st.integers(1, 9))
    def listing(self, name: str, space: str, branch: str, every: bool, before: int, limit: int) -> None:
        known = self.oracle.tasks.get(name, {}).get("checkpoints", {}).values()
        mine = [c["seq"] for c in known if c["space"] == space and (every or c["branch"] == branch)]
        want = sorted((s for s in mine if not before or s < before), reverse=True)[:limit]
        filters = {"branch": None if every else branch, "before": before or None, "limit": limit}
        assert [h.seq for h in self.ask("headers", name, space=space, **filters)] == want
        if want:
            self.hit("listing")

    @rule(name=tasks, line=st.integers(0, 2), step=st.integers(0, 1), limit=st.integers(1, 9), bodies=st.booleans())
    def list_calls(self, name: str, line: int, step: int, limit: int, bodies: bool) -> None:
        known = self.oracle.tasks.get(name, {}).get("calls", {})
        want = [no for no in sorted(known) if known[no]["step"] >= step and (not line or known[no]["line"] == line)][-limit:]
        rows, objects = self.ask("calls", name, line=line or None, from_step=step, limit=limit, bodies=bodies)
        assert [row.no for row in rows] == want
        self.oracle.same_objects(objects, *(r for row in rows if bodies for r in (row.args_refs, row.result_refs)))
        if want:
            self.hit("calls")

    @rule(after=st.sampled_from([None, *TASKS, "u"]), limit=st.integers(1, 3))
    def list_tasks(self, after: str | None, limit: int) -> None:
        want = sorted(name for name in self.oracle.tasks if after is None or name > after)[:limit]
        assert [row.task for row in self.ask("tasks", after=after, limit=limit)] == want
        if want:
            self.hit("tasks")

    @rule(name=tasks)
    def verify(self, name: str) -> None:
        self.oracle.verify(self.ask, name)

    # -- ends of the process

    def _may_end(self) -> bool:
        """A few ends in a run are enough; after each no lease is live any more, and leases have to be seen, too."""
        self.lives -= 1
        return self.lives >= 0

    @rule()
    def reopen(self) -> None:
        if self._may_end():
            self.ask.reopen()
            self.oracle.died()
            self.hit("reopen")

    @rule()
    def crash(self) -> None:
        if self._may_end():
            self.ask.crash()
            self.oracle.died()
            self.hit("crash")

    @rule(name=tasks, branch=branches, content=contents, whole=st.booleans(), point=st.integers(0, 9), call=st.booleans())
    def crash_in_a_commit(self, name: str, branch: str, content: set[int], whole: bool, point: int, call: bool) -> None:
        if not self._may_end():
            return
        c = self._checkpoint(name, "", branch, content, whole=whole)
        if call and c.expect is not None:
            c = replace(c, calls=(CallWrite(call_row(c.expect.seq), "began"),))
        want = self.oracle.judge(c)
        assert want == {"ok"}
        answered = False
        try:
            self.ask.crash_during(point, "commit", c)
            answered = True
        except Killed:
            self.hit("crash in a commit")
        found = self.ask("read", name, id=c.id)
        assert found is not None or not answered, "an acknowledged commit is gone"
        if found is not None:
            keys = {w.row.idempotency_key for w in c.calls}
            rows = [row for row in self.ask("calls", name)[0] if row.idempotency_key in keys]
            self._landed(c, rows, ())
        self.hit("whole" if found is not None else "not there")
        self.oracle.died()
        for task in TASKS:
            self.oracle.verify(self.ask, task)


def run_machine(
    machine: type[StoreMachine], *, profile: settings | None = None, everything: bool = True, seed: int | None = None
) -> None:
    """Run the machine, and see that between them its runs reached all that it is there for.

    Args:
        seed: What it draws from; None: new random numbers in each run.
    """
    can_crash: list[bool] = []
    make: Callable[[Any], Driver] = machine.driver

    def driver(self: Any) -> Driver:
        driver = make(self)
        can_crash.append(driver.can_crash)
        return driver

    reached: Counter[str] = Counter()
    watched = type(machine.__name__, (machine,), {"driver": driver, "reached": reached})
    # Twice the profile's steps: a step of a store is quick, and rules that need some history come late in a run.
    profile = profile or settings(stateful_step_count=2 * settings().stateful_step_count)
    # A store may be as slow as it likes, and a machine as busy: neither is for this to find.
    slow = {*profile.suppress_health_check, HealthCheck.too_slow}
    profile = settings(profile, derandomize=False, deadline=None, suppress_health_check=list(slow))
    missed: list[str] = []
    try:
        for i in range(8):  # each with other random numbers: a rare meeting of rules may be missing from one
            run_state_machine_as_test(watched if seed is None else seeded(seed + i)(watched), settings=profile)
            wanted = (
                machine.ALWAYS
                | (machine.CHUNKED if machine.ALWAYS and machine.chunked else frozenset())
                | (machine.PERSISTENT if any(can_crash) else frozenset())
            )
            missed = sorted(wanted - set(reached))
            if not missed or not everything:
                break
    finally:
        end_processes()
    assert not everything or not missed, f"no run has come to: {', '.join(missed)}"
