"""The verb that looks at one task as a doctor does: what it lacks, what it weighs, what it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from safepoint.codec import chunks, states
from safepoint.errors import Damaged, NotFound, SafepointError
from safepoint.model import Retention, check_id, from_us
from safepoint.rules import examining, health, planning
from safepoint.rules.examining import FieldReport, Repeat, Size
from safepoint.rules.recovery import lineage
from safepoint.stores.base import Store

__all__ = ["Doctor", "DoctorVerbs"]

_MUCH = 0.5
_LARGE = 1_000_000


@dataclass(frozen=True, slots=True)
class Doctor:
    """What ``doctor`` found of a task."""

    task_id: str
    status: str
    branch: str
    head: int | None
    """Of the current branch."""
    seq: int | None
    """The newest checkpoint that loads; what follows is about it. None if none does."""
    step: int
    saved_at: datetime | None
    skipped: tuple[tuple[int, str], ...] = ()
    """Newer ones that the branch goes back over and that do not load, and why."""
    recovery: dict[str, Any] | None = None
    """What the checkpoint records of how its run was restored."""
    requires: tuple[FieldReport, ...] = ()
    bytes: int = 0
    """Of the whole state, each occurrence counted."""
    stored: int = 0
    """Of the objects that it is stored in, each once, with those of other checkpoints that share them."""
    sizes: tuple[Size, ...] = ()
    biggest: tuple[Size, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    calls: tuple[tuple[int, str, str], ...] = ()
    """Calls that are not settled: number, tool, status."""
    pauses: tuple[tuple[int, str], ...] = ()
    """Open ones: number, name."""
    holder: dict[str, Any] | None = None
    """Of the lease, if a live run holds the task."""
    checkpoints: int = 0
    oldest: int | None = None
    pinned: int = 0
    guard: int = 0
    history: str = ""
    """The provider format of ``messages``: ``chat``, ``responses``, ``anthropic``, ``plain`` (text alone) or '' (unknown)."""
    mends: tuple[str, ...] = ()
    """What a resume does at the end of ``messages``; with ``mend=None`` calls that a step ended with are left to the next step."""
    faults: tuple[str, ...] = ()
    """Where ``messages`` break a rule of the provider that no mending heals; docs/histories.md."""
    advice: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """The head loads, and has all that the agent declared."""
        return self.seq is not None and self.seq == self.head and all(f.found == "present" for f in self.requires)


class DoctorVerbs:
    """Part of ``Checkpointer``."""

    store: Store
    retention: Retention

    if TYPE_CHECKING:

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    def doctor(self, task_id: str) -> Doctor:
        """Say what a task's newest loading checkpoint has of what the agent declared with ``requires=[…]``, what makes it big,
        what would save room, and what the task waits for. No class is needed and none is made; nothing is changed.

        Raises:
            NotFound: no such task. Damaged: not even the rows of the task can be read; ``verify`` says what is left.
        """
        store = self.store
        row = store.task(check_id(task_id))
        if row is None:
            raise self._no_task(task_id)
        lease = store.lease(task_id)
        live = lease is not None and lease.live
        headers = store.headers(task_id)
        facts: dict[str, Any] = {
            "task_id": task_id,
            "status": planning.shown_status(row, live=live),
            "branch": row.branch,
            "head": None if row.head is None else row.head.seq,
            "holder": planning.holder(lease) if live and lease is not None else None,
            "checkpoints": len(headers),
            "oldest": headers[-1].seq if headers else None,
            "pinned": sum(h.pinned for h in headers),
            "pauses": tuple((p.no, p.name) for p in store.pauses(task_id) if p.status == "open"),
        }
        try:
            calls, _ = store.calls(task_id, bodies=False)
            facts["calls"] = tuple((c.no, c.tool, c.status) for c in calls if c.status in {"started", "in_doubt", "paused"})
        except Damaged:
            pass  # verify tells what is wrong with them
        skipped: list[tuple[int, str]] = []
        tree: dict[str, Any] | None = None
        chosen = None
        stored = 0
        # As recovery goes back: also to the branches that this one came from.
        for seq in lineage(headers, store.branches(task_id), row.branch):
            try:
                found = store.read(task_id, seq=seq)
                if found is None:
                    continue
                states.check_row(task_id, found[0])
                tree = chunks.unpack_plain(found[0].root, found[0].refs, found[1], spare=states.SPARE)
                chosen = found[0]
                stored = len(chosen.root) + sum(len(o.data) + len(o.refs) for o in found[1].values())
                break
            except SafepointError as error:
                skipped.append((seq, error.why or error.what))
        facts["skipped"] = tuple(skipped)
        if tree is None or chosen is None:
            return Doctor(seq=None, step=0, saved_at=None, advice=_advice(facts, (), (), ()), **facts)
        named = tuple(tree.get("requires", ()))
        if isinstance(tree.get("requires"), str):
            named = health.paths(tree["requires"])
        required = examining.fields(tree["agent_state"], tree, named)
        parts, biggest = examining.sizes(tree)
        again = examining.repeats(tree)
        recovery = tree.get("recovery")
        form, mends, faults = examining.history_of(tree)
        return Doctor(
            seq=chosen.seq,
            step=chosen.step,
            saved_at=from_us(chosen.created_at),
            recovery=recovery if isinstance(recovery, dict) else None,
            requires=required,
            bytes=chosen.size,
            stored=stored,
            sizes=parts,
            biggest=biggest,
            repeats=again,
            guard=int(tree.get("guard", 0)),
            history=form,
            mends=mends,
            faults=faults,
            advice=_advice(facts, parts, again, required, faults),
            **facts,
        )


def _advice(
    facts: dict[str, Any],
    parts: tuple[Size, ...],
    again: tuple[Repeat, ...],
    required: tuple[FieldReport, ...],
    faults: tuple[str, ...] = (),
) -> tuple[str, ...]:
    found = []
    task = facts["task_id"]
    if facts["skipped"]:
        found.append(f"newer checkpoints do not load: `safepoint verify {task}` says what is lost")
    lacking = [f.path for f in required if f.found != "present"]
    if lacking:
        found.append(
            f"the agent declared {', '.join(lacking)}, and this state does not have it: go back with `safepoint rewind`"
        )
    if faults:
        found.append(f"the provider would refuse the history: go back with `safepoint rewind {task} SEQ`")
    total = sum(p.bytes for p in parts)
    if total >= _LARGE:
        for part in parts:
            if part.share >= _MUCH and part.path == "messages":
                found.append("the history makes up most of it: keep a window of it, or a summary of what is older")
            elif part.share >= _MUCH and part.path == "agent_state":
                found.append("agent_state makes up most of it: keep large documents outside, and their names in the state")
    spare = sum((r.times - 1) * r.bytes for r in again)
    if spare >= 10_000 and spare * 10 >= total:
        found.append(f"{spare:,} bytes are the same content again: keep it once, and refer to it")
    if facts.get("calls"):
        doubtful = [no for no, _, status in facts["calls"] if status == "in_doubt"]
        if doubtful:
            found.append(
                f"calls in doubt wait for a person: `safepoint resolve {task} {doubtful[0]} --done JSON`, or `--not-done`"
            )
    if facts["pauses"]:
        found.append(f"a question waits for an answer: `safepoint pauses {task}`")
    return tuple(found)
