"""The part of the machine that does what adapters do: it records writes, and sets branches back and drops them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from safepoint.model import new_id
from safepoint.rows import BranchWrite, Commit, Guard, Head, replace
from safepoint.testing.build import flat, write_row
from safepoint.testing.draws import contents, picks, spaces, tasks
from safepoint.testing.drive import Driver
from safepoint.testing.oracle import Oracle

__all__ = ["Adapting"]


class Adapting:
    """Needs what ``StoreMachine`` has."""

    chunked: ClassVar[bool]
    ask: Driver
    oracle: Oracle

    if TYPE_CHECKING:

        def hit(self, what: str) -> None: ...
        def _head(self, name: str, space: str, branch: str) -> Head | None: ...
        def _guard(self, name: str) -> Guard | None: ...
        def _things(self, content: set[int]) -> list[Any]: ...
        def _sent(self, things: Any) -> tuple[Any, ...]: ...
        def _commit(self, c: Commit) -> str: ...

    @rule(
        name=tasks,
        space=spaces,
        which=picks,
        writer=st.sampled_from(["w", "it's \N{SNOWMAN}"]),
        idx=st.integers(-2, 2),
        count=st.integers(1, 3),
        content=contents,
        whole=st.booleans(),
    )
    def write(
        self, name: str, space: str, which: int, writer: str, idx: int, count: int, content: set[int], whole: bool
    ) -> None:
        self._write(name, space, which, content, writer=writer, idx=idx, count=count, whole=whole)

    def _write(
        self,
        name: str,
        space: str,
        which: int,
        content: set[int],
        *,
        writer: str = "w",
        idx: int = 0,
        count: int = 1,
        whole: bool = True,
    ) -> None:
        task = self.oracle.tasks.get(name, {})
        ids = [*(c["id"] for c in task.get("checkpoints", {}).values() if c["space"] == space), "unborn"]
        id = ids[which % len(ids)]
        things, head = self._things(content), self._head(name, "", "main")
        there: dict[bytes, Any] = {} if whole or head is None else self.oracle.reach(task["checkpoints"][head.seq]["refs"])
        rows = [
            write_row(id, things[:1], writer=writer, idx=idx + i, space=space, path=f"p{which % 3}", data=b"\0%d" % which)
            for i in range(count)
        ]
        known = {row.key for row in rows if row.key in task.get("writes", {})}
        c = Commit(
            task=name,
            id=new_id(),
            guard=self._guard(name),
            objects=self._sent(o for o in things if o.name not in there),
            stands_on=head if there else None,
            writes=tuple(rows if self.chunked else map(flat, rows)),
        )
        if self._commit(c) == "ok":
            self.hit("write of an unborn one" if id == "unborn" else "write")
            for key in known:
                self.hit("write replaced" if key[3] < 0 else "write left out")

    @rule(name=tasks, space=st.sampled_from([None, "", "ns"]), which=picks, by=st.booleans())
    def list_writes(self, name: str, space: str | None, which: int, by: bool) -> None:
        task = self.oracle.tasks.get(name)
        if task is None:
            return
        keys = sorted(task["writes"])
        some = [keys[(which + i) % len(keys)][1] for i in range(2)] if keys and by else None
        writer = keys[which % len(keys)][2] if keys and which % 3 == 0 else None
        if self.oracle.verify_writes(self.ask, name, task, space=space, checkpoints=some, writer=writer):
            self.hit("writes")

    @rule(name=tasks, space=spaces, which=picks, to=picks, how=st.sampled_from(["back", "back", "drop", "stale"]))
    def move(self, name: str, space: str, which: int, to: int, how: str) -> None:
        task = self.oracle.tasks.get(name, {"branches": {}, "checkpoints": {}, "current": ""})
        names = sorted(branch for of, branch in task["branches"] if of == space)
        if not names:
            return
        branch = names[which % len(names)]
        head = self._head(name, space, branch)
        assert head is not None
        there = [c for c in task["checkpoints"].values() if c["space"] == space and c["kind"] != "failure"]
        at = there[to % len(there)]
        move = BranchWrite(space=space, name=branch, expect=head, to=None if how == "drop" else Head(at["seq"], at["id"]))
        if how == "stale":
            move = replace(move, expect=Head(head.seq, "another"))
        got = self._commit(Commit(task=name, id=new_id(), guard=self._guard(name), branches=(move,)))
        wanted = {"ok": "dropped" if how == "drop" else "set back", "UsageError": "current kept", "Conflict": "branch moved"}
        self.hit(wanted.get(got, "not moved"))
