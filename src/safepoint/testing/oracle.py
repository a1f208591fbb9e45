"""What a store should hold, in plain dicts: a second reading of the contract that shares no code with any store.

It is asked what a verb should answer before the store is, and told what the store answered; it works out all else itself.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Oracle", "as_dict"]

GIVEN = {"seal", "seq", "no", "version", "began", "ended", "pinned"}
"""Fields that the store gives, or that change by other verbs."""


def as_dict(row: Any) -> dict[str, Any]:
    return {f: getattr(row, f) for f in row.__struct_fields__}


class Oracle:
    def __init__(self) -> None:
        self.tasks: dict[str, dict[str, Any]] = {}
        self.world: dict[bytes, tuple[bytes, bytes]] = {}
        """Every object there ever was: name -> (refs, data)."""
        self.deleted_fences: dict[str, int] = {}

    # -- objects

    def reach(self, *roots: bytes) -> dict[bytes, tuple[bytes, bytes]]:
        found: dict[bytes, tuple[bytes, bytes]] = {}
        todo = [refs[i : i + 16] for refs in roots for i in range(0, len(refs), 16)]
        while todo:
            name = todo.pop()
            if name not in found:
                found[name] = refs, _ = self.world[name]
                todo += [refs[i : i + 16] for i in range(0, len(refs), 16)]
        return found

    # -- commits

    def judge(self, c: Any) -> set[str]:
        """How a commit may end: ok, existed, or the name of an error; empty where the contract leaves it open."""
        task, new = self.tasks.get(c.task), c.checkpoint
        if task is not None and new is not None:
            for there in task["checkpoints"].values():
                if (there["space"], there["id"]) == (new.space, c.id):
                    same = all(there[f] == getattr(new, f) for f in ("branch", "parent_seq", "digest"))
                    return {"existed" if same else "UsageError"}
        if task is None:
            if new is None and not c.writes:
                return {"NotFound"}
            if c.guard is not None:
                return {"NotFound", "LeaseLost"}
            task = _new_task()
        lease = task["lease"]
        if c.guard is not None:
            if lease is None or lease["state"] != "held" or lease["guard"] != tuple(c.guard):
                return {"LeaseLost"}
            if not lease["live"]:
                return set()  # of a run that was let go of nobody asks for more
        elif not c.anyway and lease is not None and lease["live"]:
            return {"LeaseHeld"}
        if new is None and task["last"] == c.id:
            return {"existed"}
        if new is not None:
            branch = task["branches"].get((new.space, new.branch))
            if (branch and branch["head"]) != (c.expect and tuple(c.expect)):
                return {"Conflict"}
        if c.at_head:
            current = task["branches"].get(("", task["current"]))
            if (current and current["head"]) != (c.stands_on and tuple(c.stands_on)):
                return {"Conflict"}
        bad: set[str] = set()
        if c.stands_on is not None:
            at = task["checkpoints"].get(c.stands_on.seq)
            if at is None or at["id"] != c.stands_on.id:
                bad.add("NotFound")
        for kind, writes in (("calls", c.calls), ("pauses", c.pauses)):
            for write in writes:
                if write.row.version:
                    row = task[kind].get(write.row.no)
                    if row is None:
                        bad.add("NotFound")
                    elif row["version"] != write.row.version:
                        bad.add("Conflict")
        bad |= self._moved(task, c)
        return bad or {"ok"}

    @staticmethod
    def _moved(task: dict[str, Any], c: Any) -> set[str]:
        """What is wrong with the branches that a commit sets back or drops."""
        bad: set[str] = set()
        left = {name for space, name in task["branches"] if space == ""}
        for move in c.branches:
            at = task["branches"].get((move.space, move.name))
            if at is None or at["head"] != tuple(move.expect):
                bad.add("Conflict")
            if move.to is None:
                left -= {move.name} if move.space == "" else set()
            else:
                to = task["checkpoints"].get(move.to.seq)
                if to is None or (to["id"], to["space"]) != (move.to.id, move.space):
                    bad.add("NotFound")
        current = (c.patch and c.patch.branch) or task["current"]
        if left and any((m.space, m.name, m.to) == ("", current, None) for m in c.branches):
            bad.add("UsageError")
        return bad

    def landed(self, c: Any, calls: Any, pauses: Any) -> None:
        """Take over a commit that was judged ok, with the journal rows as the store answered them."""
        task = self.tasks.setdefault(c.task, _new_task())
        task["last"] = c.id
        task["stored"].update(o.name for o in c.objects)
        assert len(calls) == len(c.calls)
        for write, row in zip(c.calls, calls, strict=True):
            got = self._compared(task, "calls", write.row, row)
            for stamp in ("began", "ended"):
                if write.stamp == stamp:
                    assert got[stamp] > task["position"], "a journal position did not rise"
                    task["position"] = got[stamp]
                else:
                    assert got[stamp] == getattr(write.row, stamp)
        assert len(pauses) == len(c.pauses)
        for write, row in zip(c.pauses, pauses, strict=True):
            self._compared(task, "pauses", write.row, row)
        for sent in c.writes:
            place = sent.space, sent.checkpoint, sent.writer, sent.idx
            if sent.idx < 0 or place not in task["writes"]:
                task["writes"][place] = as_dict(sent)
        for move in c.branches:
            if move.to is None:
                del task["branches"][move.space, move.name]
            else:
                task["branches"][move.space, move.name]["head"] = tuple(move.to)
        new = c.checkpoint
        if new is not None:
            task["seq"] += 1
            task["checkpoints"][task["seq"]] = {**as_dict(new), "id": c.id, "seq": task["seq"], "pinned": False}
            if c.moves_head:
                key = new.space, new.branch
                if new.space == "" and not any(space == "" for space, _ in task["branches"]):
                    task["current"] = new.branch
                task["branches"].setdefault(key, {"forked_from": new.parent_seq, "line": c.line})["head"] = task["seq"], c.id
        if c.patch is not None:
            task["current"] = c.patch.branch or task["current"]
            task["status"] = c.patch.status or task["status"]

    def _compared(self, task: dict[str, Any], kind: str, sent: Any, got_row: Any) -> dict[str, Any]:
        want, got = as_dict(sent), as_dict(got_row)
        assert {k: v for k, v in got.items() if k not in GIVEN} == {k: v for k, v in want.items() if k not in GIVEN}
        assert got["version"] == want["version"] + 1
        if want["version"]:
            assert got["no"] == want["no"]
        else:
            assert got["no"] > task["last_no"][kind], "a number was given twice"
            task["last_no"][kind] = got["no"]
        task[kind][got["no"]] = got
        return got

    # -- leases

    def acquired(self, name: str, grant: Any) -> None:
        task = self.tasks.setdefault(name, _new_task())
        old = task["lease"]
        previous, presumed, fence = "", 0, 0
        if old is not None:
            fence, presumed = old["guard"][0], old["presumed"]
            previous = "released" if old["state"] == "released" else "presumed_dead" if old["live"] else "dead"
            if previous == "presumed_dead":
                presumed = fence
        assert (grant.previous, grant.presumed) == (previous, presumed)
        assert grant.guard.fence > max(fence, self.deleted_fences.get(name, 0) if old is None else 0)
        if old is not None:
            assert grant.guard.fence == fence + 1
            assert grant.guard.token != old["guard"][1]
        task["lease"] = {"guard": tuple(grant.guard), "state": "held", "live": True, "presumed": presumed}
        task["status"], task["attempts"] = "running", task["attempts"] + 1

    def is_live(self, name: str) -> bool:
        lease = self.tasks.get(name, {}).get("lease")
        return bool(lease and lease["live"])

    def owns(self, name: str, guard: Any) -> bool:
        return self.is_live(name) and self.tasks[name]["lease"]["guard"] == tuple(guard)

    def released(self, name: str, guard: Any, status: str) -> None:
        if self.owns(name, guard):
            self.tasks[name]["lease"].update(state="released", live=False)
            self.tasks[name]["status"] = status

    def abandoned(self, name: str, guard: Any) -> None:
        if self.owns(name, guard):
            self.tasks[name]["lease"]["live"] = False

    def died(self) -> None:
        for task in self.tasks.values():
            if task["lease"] is not None:
                task["lease"]["live"] = False

    # -- removing

    @staticmethod
    def _ahead(task: dict[str, Any], branch: dict[str, Any]) -> list[dict[str, Any]]:
        """The calls and pauses that a resume of a branch would read."""
        step = task["checkpoints"][branch["head"][0]]["step"] if branch["head"] else 0
        rows = (*task["calls"].values(), *task["pauses"].values())
        return [r for r in rows if r["line"] == branch["line"] and r["step"] >= step]

    def pruned(self, name: str, seqs: list[int], space: str, dry_run: bool, got: Any) -> bool:
        """Compare; whether something had to stay for a resume and for nothing else."""
        task = self.tasks.get(name)
        if task is None:
            assert got.seqs == ()
            return False
        must = {s for s, c in task["checkpoints"].items() if c["pinned"] or c["space"] != space}
        for branch in task["branches"].values():
            must |= {branch["head"][0], branch["forked_from"]}
        must |= {c["base_seq"] for c in task["calls"].values() if c["status"] in {"started", "in_doubt", "paused"}}
        must |= {p["base_seq"] for p in task["pauses"].values() if p["status"] != "used"}
        resumed: set[int] = set()
        current = task["branches"].get(("", task["current"]))
        for branch in task["branches"].values():
            assert branch["line"] is not None
            # One that was left behind does not keep what the current one of its line has done since.
            if branch is current or current is None or current["line"] != branch["line"]:
                resumed |= {r["base_seq"] for r in self._ahead(task, branch)}
        told = bool(resumed - must & set(seqs))
        must |= resumed
        may: set[int] = set()
        if self.is_live(name):
            own = [c["base_seq"] for c in task["calls"].values() if c["fence"] == task["lease"]["guard"][0]]
            may = set(own)
            must |= {max(own, default=0)}
        wanted = {s for s in seqs if s in task["checkpoints"]}
        gone = set(got.seqs)
        assert list(got.seqs) == sorted(gone)
        assert wanted - must - may <= gone <= wanted - must, "deleted what is needed, or kept what is not"
        calls = {n for n, c in task["calls"].items() if c["base_seq"] in gone}
        pauses = {n for n, p in task["pauses"].items() if p["base_seq"] in gone}
        assert got.calls == len(calls)
        ids = {task["checkpoints"][s]["id"] for s in gone}
        writes = {key for key in task["writes"] if key[0] == space and key[1] in ids}
        roots = [c["refs"] for s, c in task["checkpoints"].items() if s not in gone]
        roots += [c[f] for n, c in task["calls"].items() if n not in calls for f in ("args_refs", "result_refs")]
        roots += [w["refs"] for key, w in task["writes"].items() if key not in writes]
        swept = task["stored"] - set(self.reach(*roots))
        # Objects that a rewritten call row has let go of wait for a sweep; one that deletes no row may leave them.
        assert got.objects in ({len(swept)} if gone else {0, len(swept)})
        if got.objects and not dry_run:
            task["stored"] -= swept
        if not dry_run:
            for seq in gone:
                del task["checkpoints"][seq]
            for no in calls:
                del task["calls"][no]
            for no in pauses:
                del task["pauses"][no]
            for key in writes:
                del task["writes"][key]
        return told

    def deleted(self, name: str) -> bool:
        task = self.tasks.pop(name, None)
        if task is not None and task["lease"] is not None:
            fence = task["lease"]["guard"][0]
            self.deleted_fences[name] = max(fence, self.deleted_fences.get(name, 0))
        return task is not None

    # -- the whole

    def verify(self, ask: Any, name: str) -> None:
        """Compare all that the store shows of a task."""
        task = self.tasks.get(name)
        row = ask("task", name)
        if task is None:
            assert row is None
            assert ask("read", name) is None
            assert ask("calls", name) == ([], {})
            assert ask("writes", name, space=None) == ([], {})
            assert ask("lease", name) is None
            return
        head = task["branches"].get(("", task["current"]), {}).get("head")
        assert row is not None
        seen = (
            row.status,
            row.attempts,
            row.branch,
            row.head and tuple(row.head),
            row.checkpoints,
            row.in_doubt,
            row.open_pauses,
        )
        self.learn_lines(ask, name)
        current = task["branches"].get(("", task["current"]))
        ahead = self._ahead(task, current or {"line": 1, "head": None})
        doubts = sum(r["status"] == "in_doubt" for r in ahead)
        asked = sum(r["status"] == "open" for r in ahead)
        want = (task["status"], task["attempts"], task["current"], head, len(task["checkpoints"]), doubts, asked)
        assert seen == want
        for space in sorted({c["space"] for c in task["checkpoints"].values()} | {""}):
            self._verify_space(ask, name, task, space)
        calls, bodies = ask("calls", name)
        assert [as_dict(c) for c in calls] == [task["calls"][no] for no in sorted(task["calls"])]
        self.same_objects(bodies, *(r for c in calls for r in (c.args_refs, c.result_refs)))
        pauses = ask("pauses", name)
        assert [as_dict(p) for p in pauses] == [task["pauses"][no] for no in sorted(task["pauses"])]
        writes = self.verify_writes(ask, name, task, space=None)
        for kept in (*calls, *pauses, *writes):
            kept.check(name, "row")
        lease = ask("lease", name)
        if task["lease"] is None:
            assert lease is None
        else:
            got = {"guard": (lease.fence, lease.token), "state": lease.state, "live": lease.live, "presumed": lease.presumed}
            assert got == task["lease"]

    def verify_writes(self, ask: Any, name: str, task: dict[str, Any], **asked: Any) -> Any:
        """Compare what ``writes`` answers to this, and return its rows."""
        space, ids, writer = (asked.get(word) for word in ("space", "checkpoints", "writer"))
        want = [
            w
            for w in task["writes"].values()
            if space in (None, w["space"]) and writer in (None, w["writer"]) and (ids is None or w["checkpoint"] in ids)
        ]
        want.sort(key=lambda w: (w["space"], w["checkpoint"], w["path"], w["writer"], w["idx"]))
        rows, objects = ask("writes", name, **asked)
        assert [{**as_dict(row), "seal": b""} for row in rows] == want
        self.same_objects(objects, *(row.refs for row in rows))
        return rows

    def _verify_space(self, ask: Any, name: str, task: dict[str, Any], space: str) -> None:
        mine = {s: c for s, c in task["checkpoints"].items() if c["space"] == space}
        assert [h.seq for h in ask("headers", name, space=space)] == sorted(mine, reverse=True)
        for seq, want_row in mine.items():
            self.same_checkpoint(ask("read", name, space=space, seq=seq), name, want_row)
        branches = {(b.space, b.name): b for b in ask("branches", name, space)}
        want = {key: b for key, b in task["branches"].items() if key[0] == space}
        assert branches.keys() == want.keys()
        for key, branch in want.items():
            got = branches[key]
            assert (tuple(got.head), got.forked_from, got.line) == (branch["head"], branch["forked_from"], branch["line"])

    def learn_lines(self, ask: Any, name: str) -> None:
        """Take over the lines that the store gave to new branches."""
        task = self.tasks.get(name, _new_task())
        lines = [b["line"] for b in task["branches"].values()]
        for space in sorted({space for (space, _), b in task["branches"].items() if b["line"] is None}):
            for got in ask("branches", name, space):
                branch = task["branches"][space, got.name]
                if branch["line"] is None:
                    assert got.line not in lines, "a new branch was given a line that another has"
                    branch["line"] = got.line
                    lines.append(got.line)

    def same_checkpoint(self, found: Any, name: str, want: dict[str, Any] | None) -> None:
        if want is None:
            assert found is None
            return
        assert found is not None
        row, objects = found
        row.check(name, "checkpoint")
        assert {**as_dict(row), "seal": b""} == {**want, "seal": b""}
        self.same_objects(objects, row.refs)

    def same_objects(self, objects: Any, *roots: bytes) -> None:
        assert {n: (o.refs, o.data) for n, o in objects.items()} == self.reach(*roots)
        assert all(name == o.name for name, o in objects.items())


def _new_task() -> dict[str, Any]:
    return {
        "status": "idle",
        "current": "main",
        "attempts": 0,
        "seq": 0,
        "position": 0,
        "last": "",
        "last_no": {"calls": 0, "pauses": 0},
        "checkpoints": {},
        "branches": {},
        "calls": {},
        "pauses": {},
        "writes": {},
        "stored": set(),
        "lease": None,
    }
