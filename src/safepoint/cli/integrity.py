"""Commands that look after what is stored: verify, repair, doctor, accept, edit. Each registers itself with the group of ``app``."""

from __future__ import annotations

from typing import Any

import click

from safepoint.cli.app import as_json, cli, common, opened, shown, yes
from safepoint.cli.ending import STORE
from safepoint.cli.screen import Column, Screen, Styled
from safepoint.cli.text import clean, clock, command, in_shell, iso, many, name, shell, size
from safepoint.codec import to_json
from safepoint.doctoring import Doctor
from safepoint.integrity import Repair
from safepoint.rules.history.base import NAMES
from safepoint.rules.verifying import BranchReport, Damage, Verification, spans

DAMAGED = 6


@cli.command()
@click.argument("task", required=False)
@common
def verify(task: str | None) -> int:
    """Read everything that is stored, and say exactly what is damaged and what still loads.

    Of one task, or of all with the store's own structure. Agents may work meanwhile; nothing is changed. Exit code 6 if
    anything is damaged.
    """
    with opened() as cp, shown("tasks") as progress:
        found = cp.verify(task, progress=progress)
    if as_json():
        Screen().json(_verification(found))
    else:
        _show(Screen(), found, task)
    return 0 if found.ok else DAMAGED


@cli.command()
@click.argument("task", required=False)
@click.option("--into", metavar="URL", help="An empty store to write to; else one beside this, named .repaired.")
@click.option("--in-place", is_flag=True, help="Move damaged rows to a quarantine in this store, after making a copy of it.")
@yes
@common
def repair(task: str | None, into: str | None, in_place: bool, yes: bool) -> None:
    """Make a store without the damage of this one.

    What is whole stays as it is; nothing is deleted. A branch whose head is lost goes on from the newest checkpoint that
    loads, on a new branch.
    """
    if in_place and not yes:
        click.confirm("Change this store? A copy of it is made first.", abort=True, err=True)
    with opened() as cp, shown("tasks") as progress:
        done = cp.repair(task, into=into, in_place=in_place, progress=progress)
    if as_json():
        Screen().json(_repair(done))
    else:
        _repaired(Screen(), done)


@cli.command()
@click.argument("task")
@common
def doctor(task: str) -> None:
    """Say what a task lacks, what makes it big, and what it waits for.

    Of its newest checkpoint that loads: the fields that the agent declared with requires=[...], the sizes of its parts,
    content that stands in it more than once; then open calls, questions, and who holds it.
    """
    with opened() as cp:
        found = cp.doctor(task)
    if as_json():
        Screen().json(_doctor(found))
    else:
        _examined(Screen(), found)


# -- as JSON


def _runs(runs: tuple[tuple[int, int], ...]) -> list[list[int]]:
    return [list(run) for run in runs]


def _damage(d: Damage) -> dict[str, Any]:
    return {
        "task_id": d.task_id,
        "kind": d.kind,
        "what": d.what,
        "where": d.where,
        "why": d.why,
        "checkpoints": _runs(d.checkpoints),
        "calls": _runs(d.calls),
        "writes": [list(key) for key in d.writes],
    }


def _branch(b: BranchReport) -> dict[str, Any]:
    return {
        "task_id": b.task_id,
        "space": b.space,
        "name": b.name,
        "current": b.current,
        "head": b.head,
        "head_loads": b.head_loads,
        "loads": _runs(b.loads),
        "newest_good": b.newest_good,
    }


def _verification(v: Verification) -> dict[str, Any]:
    counts = {n: getattr(v, n) for n in ("tasks", "checkpoints", "calls", "pauses", "writes", "objects", "bytes")}
    return {
        "ok": v.ok,
        **counts,
        "seconds": round(v.seconds, 3),
        "damages": [_damage(d) for d in v.damages],
        "branches": [_branch(b) for b in v.branches],
        "notes": [{"task_id": n.task_id, "text": n.text} for n in v.notes],
    }


def _repair(r: Repair) -> dict[str, Any]:
    lost = {
        key: {task: _runs(runs) for task, runs in getattr(r, key).items()}
        for key in ("lost_checkpoints", "lost_calls", "bare_calls", "lost_pauses")
    }
    return {
        "url": r.url,
        "in_place": r.in_place,
        "backup": r.backup,
        "tasks": r.tasks,
        "damages": [_damage(d) for d in r.damages],
        "fell_back": [
            {
                "task_id": f.task_id,
                "branch": f.branch,
                "new_branch": f.new_branch,
                "lost_head": f.lost_head,
                "seq": f.seq,
                "guard": f.guard,
                "why": f.why,
            }
            for f in r.fell_back
        ],
        **lost,
        "lost_writes": {task: [list(key) for key in keys] for task, keys in r.lost_writes.items()},
        "left_behind": r.left_behind,
        "set_aside": r.set_aside,
    }


def _doctor(d: Doctor) -> dict[str, Any]:
    def sized(parts: Any) -> list[dict[str, Any]]:
        return [{"path": p.path, "bytes": p.bytes, "share": round(p.share, 4), "items": p.items} for p in parts]

    return {
        "task_id": d.task_id,
        "ok": d.ok,
        "status": d.status,
        "branch": d.branch,
        "head": d.head,
        "seq": d.seq,
        "step": d.step,
        "saved_at": iso(d.saved_at),
        "skipped": [list(s) for s in d.skipped],
        "recovery": to_json(d.recovery),
        "requires": [{"path": f.path, "found": f.found, "type": f.type} for f in d.requires],
        "bytes": d.bytes,
        "stored": d.stored,
        "sizes": sized(d.sizes),
        "biggest": sized(d.biggest),
        "repeats": [{"paths": list(r.paths), "times": r.times, "bytes": r.bytes} for r in d.repeats],
        "calls": [{"no": no, "tool": tool, "status": status} for no, tool, status in d.calls],
        "pauses": [{"no": no, "name": title} for no, title in d.pauses],
        "holder": d.holder,
        "checkpoints": d.checkpoints,
        "oldest": d.oldest,
        "pinned": d.pinned,
        "guard": d.guard,
        "history": d.history,
        "mends": list(d.mends),
        "faults": list(d.faults),
        "advice": list(d.advice),
    }


# -- for people


def _show(screen: Screen, v: Verification, task: str | None) -> None:
    kinds = ("tasks", "checkpoints", "calls", "pauses", *(("writes",) if v.writes else ()), "objects")
    read = ", ".join(many(getattr(v, kind), kind) for kind in kinds)
    screen.line(f"read {read}: {size(v.bytes)} in {v.seconds:.1f} s")
    if v.ok:
        screen.line("nothing is damaged", "green")
    else:
        screen.line(f"{len(v.damages)} damaged", "bold red")
        columns = [
            Column("task"),
            Column("damaged"),
            Column("why", fold=True),
            Column("where", fold=True),
            Column("takes with it", fold=True),
        ]
        screen.table(columns, [_line(d) for d in v.damages])
    for b in v.branches:
        where = f"{name(b.task_id)}, branch {name(b.name)}" + (f" of space {name(b.space)}" if b.space else "")
        if b.head_loads:
            screen.line(f"{where}: head {b.head} loads; loading: {spans(b.loads)}")
        else:
            good = "none loads" if b.newest_good is None else f"the newest that loads is {b.newest_good}"
            screen.line(f"{where}: head {b.head} does not load, {good}; loading: {spans(b.loads) or 'none'}", "yellow")
    for note in v.notes:
        screen.line(f"note: {note}")
    if not v.ok:
        hint = f"{command(click.get_current_context().meta.get(STORE))} repair{'' if task is None else ' ' + shell(task)}"
        click.echo(f"{hint} makes a store of what is whole.", err=True)


def _line(d: Damage) -> list[str | Styled]:
    takes = []
    if d.checkpoints and d.kind != "checkpoint":
        takes.append(f"checkpoints {spans(d.checkpoints)}")
    if d.calls and d.kind != "call":
        takes.append(f"calls {spans(d.calls)}")
    if d.writes and d.kind != "write":
        takes.append(many(len(d.writes), "writes"))
    return ["" if d.task_id is None else name(d.task_id), Styled(clean(d.what), "red"), d.why, d.where, ", ".join(takes)]


def _repaired(screen: Screen, r: Repair) -> None:
    if not r.damages and not r.left_behind and not r.set_aside:
        screen.line(
            f"nothing is damaged in {many(r.tasks, 'tasks')}" + ("" if r.in_place else f"; a copy of them is in {r.url}")
        )
        return
    screen.line(f"{len(r.damages)} damaged in {many(r.tasks, 'tasks')}; what is whole is in {r.url}")
    if r.backup is not None:
        screen.line(f"as it was before: {r.backup}")
    if r.in_place:
        screen.line(f"{r.set_aside} rows and objects are in its quarantine")
    for fell in r.fell_back:
        screen.line(str(fell), "yellow")
    for key, what in (
        ("lost_checkpoints", "checkpoints left out"),
        ("lost_calls", "calls left out"),
        ("bare_calls", "calls kept without their lost arguments and results"),
        ("lost_pauses", "questions left out"),
    ):
        for task, runs in getattr(r, key).items():
            screen.line(f"{name(task)}: {what}: {spans(runs)}")
    for task, keys in r.lost_writes.items():
        screen.line(f"{name(task)}: writes left out: {clean(', '.join(map(repr, keys)))}")
    for text in r.left_behind:
        screen.line(f"left behind, as it belongs to no task that is known: {text}")


def _examined(screen: Screen, d: Doctor) -> None:
    at = "no checkpoint loads" if d.seq is None else f"checkpoint {d.seq}, step {d.step}, saved {clock(d.saved_at)}"
    recovery = None
    if d.recovery is not None:
        recovery = f"{d.recovery.get('mode', '')} from {d.recovery.get('seq')}"
    screen.pairs(
        [
            ("task", name(d.task_id)),
            ("status", d.status),
            ("restores", at),
            ("branch", name(d.branch)),
            ("skipped", "; ".join(f"{seq}: {why}" for seq, why in d.skipped)),
            ("restored", recovery),
            ("guard", f"steps below {d.guard}" if d.guard else None),
            ("size", f"{size(d.bytes)}, in objects of {size(d.stored)}" if d.seq is not None else None),
            ("kept", f"{many(d.checkpoints, 'checkpoints')}, the oldest is {d.oldest}, {d.pinned} pinned"),
            ("held by", None if d.holder is None else f"pid {d.holder.get('pid')} on {d.holder.get('host')}"),
            ("calls", ", ".join(f"{no} {name(tool)} ({status})" for no, tool, status in d.calls)),
            ("pauses", ", ".join(f"{no} {name(title)}" for no, title in d.pauses)),
            ("history", NAMES[d.history] if d.history else None),
        ]
    )
    for text in d.faults:
        screen.line(text, "bold red")
    for text in d.mends:
        screen.line(f"mended when it is resumed: {text}", "yellow")
    if d.requires:
        screen.line()
        style = {"present": "green", "missing": "bold red", "empty": "yellow", "None": "bold red"}
        screen.table(
            [Column("required"), Column("found"), Column("type")],
            [[f.path, Styled(f.found, style[f.found]), f.type] for f in d.requires],
        )
    for title, parts in (("part", d.sizes), ("biggest", d.biggest)):
        if parts:
            screen.line()
            screen.table(
                [Column(title), Column("bytes", right=True), Column("share", right=True), Column("items", right=True)],
                [[p.path, f"{p.bytes:,}", f"{p.share:.0%}", "" if p.items is None else str(p.items)] for p in parts],
            )
    if d.repeats:
        screen.line()
        screen.table(
            [Column("the same content at", fold=True), Column("times", right=True), Column("bytes", right=True)],
            [[", ".join(r.paths) + (", …" if r.times > len(r.paths) else ""), str(r.times), f"{r.bytes:,}"] for r in d.repeats],
        )
    if d.advice:
        screen.line()
        for text in d.advice:
            screen.line(in_shell(text, click.get_current_context().meta.get(STORE)))
