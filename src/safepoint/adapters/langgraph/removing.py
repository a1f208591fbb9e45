"""Deleting, pruning and copying threads: what is decided by ``pruning``, carried out on a store."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from safepoint import imaging
from safepoint.adapters.langgraph.pending import HIDDEN
from safepoint.adapters.langgraph.pruning import Item, Ref, beyond_latest, is_call, plan, with_subgraphs
from safepoint.adapters.langgraph.reading import MARK, Header
from safepoint.errors import Conflict, Damaged, LeaseHeld, NotFound, SafepointError, UsageError
from safepoint.model import check_id, new_id, now
from safepoint.rows import BranchWrite, Commit, TaskPatch, WriteRow, replace
from safepoint.rules import retention

if TYPE_CHECKING:
    from safepoint.adapters.langgraph.saver import SafepointSaver

log = logging.getLogger("safepoint")

TRIES = 8
"""How often a thread is looked at anew that goes on while it is looked at."""


def items_of(saver: SafepointSaver, thread: str) -> list[tuple[Item, Header]]:
    found = []
    for row in saver.store.headers(thread, space=None):
        header = Header.of(saver.form, row)
        metadata = header.metadata
        parents = metadata.get("parents")
        counters = metadata.get("counters_since_delta_snapshot")
        item = Item(
            ns=row.space,
            id=row.id,
            seq=row.seq,
            parent=header.parent,
            root=parents.get("") if isinstance(parents, dict) else None,
            deltas=frozenset(counters) if isinstance(counters, dict) else frozenset(),
            run_id=metadata.get("run_id"),
        )
        found.append((item, header))
    return found


def remove(saver: SafepointSaver, thread: str, doomed: Collection[Ref]) -> None:
    """Delete these checkpoints. What other threads see is all of it at once; what it takes up goes afterwards, and if this process
    dies in between, with the next deletion in that thread."""
    for attempt in range(TRIES):
        items = [item for item, _ in items_of(saver, thread)]
        branches = saver.store.branches(thread, None)
        hidden = hidden_of(saver, thread)
        found = plan(items, branches, doomed, hidden)
        if not found:
            return
        going = {(ns, seq) for ns, seqs in found.gone.items() for seq in seqs}
        gone = {item.ref for item in items if (item.ns, item.seq) in going}
        unseen = sorted((gone | set(found.hidden)) - hidden)
        try:
            _hide(saver, thread, unseen, found.moves, found.current)
        except Conflict:
            if attempt + 1 == TRIES:
                raise
            continue
        saver._records.forget(thread)
        for ns, seqs in found.gone.items():
            saver.store.prune(thread, seqs, space=ns)
        return


def hidden_of(saver: SafepointSaver, thread: str) -> set[Ref]:
    """Those that were deleted, and are still there: because others need them, or because that process died."""
    marks, _ = saver.store.writes(thread, space=None, bodies=False, writer=HIDDEN)
    return {(row.space, row.checkpoint) for row in marks}


def _hide(saver: SafepointSaver, thread: str, refs: list[Ref], moves: Sequence[BranchWrite], current: str | None) -> None:
    """One commit, so that nobody, and no process that dies, leaves a thread half deleted: a mark is a hundred bytes."""
    rows = tuple(WriteRow(space=ns, checkpoint=id, writer=HIDDEN, idx=MARK) for ns, id in refs)
    if rows or moves:
        saver.commit(
            Commit(
                task=thread,
                id=new_id(),
                writes=rows,
                branches=tuple(moves),
                patch=TaskPatch(branch=current) if moves and current is not None else None,
            )
        )


def delete_runs(saver: SafepointSaver, runs: Collection[str]) -> None:
    """Thread by thread. One that cannot be read, or that somebody holds, is told of after the others are done."""
    failed: SafepointError | None = None
    for thread in _threads(saver) if runs else ():
        try:
            items = [item for item, _ in items_of(saver, thread)]
            doomed = {item.ref for item in items if item.run_id in runs}
            if doomed and len(doomed | hidden_of(saver, thread)) == len(items):
                saver.delete_thread(thread)
            elif doomed:
                remove(saver, thread, doomed)
        except (Damaged, LeaseHeld, UsageError) as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _threads(saver: SafepointSaver) -> list[str]:
    names: list[str] = []
    while tasks := saver.store.tasks(after=names[-1] if names else None):
        names += [task.task for task in tasks]
    return names


def prune(saver: SafepointSaver, threads: Iterable[str], strategy: str) -> None:
    if strategy not in {"keep_latest", "delete"}:
        raise UsageError(f"there is no strategy {strategy!r}", "", "Use 'keep_latest' or 'delete'.")
    for thread in threads:
        if strategy == "delete":
            saver.delete_thread(thread)
        elif saver.store.task(thread) is not None:
            hidden = hidden_of(saver, thread)
            items = [item for item, _ in items_of(saver, thread) if item.ref not in hidden]
            damaged = _damaged(saver, thread, items)
            remove(saver, thread, beyond_latest(item for item in items if item.ref not in damaged))


def _damaged(saver: SafepointSaver, thread: str, items: list[Item]) -> set[Ref]:
    """Those that are newer than the newest sound one of their namespace; not of a subgraph's calls that go, whatever they hold."""
    seqs: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: -item.seq):
        seqs.setdefault(item.ns, []).append(item)
    found: set[Ref] = set()
    top: str | None = None
    for ns in sorted(seqs):  # the root graph first
        of = seqs[ns]
        if is_call(ns) and top is not None and of[0].root not in {None, top}:
            continue
        bad = _unreadable(saver, thread, [item.seq for item in of], ns)
        found |= {item.ref for item in of if item.seq in bad}
        if ns == "":
            top = next((item.id for item in of if item.seq not in bad), None)
    return found


def retain(saver: SafepointSaver, thread: str, seq: int) -> None:
    """What retention lets go, now and then. It is never a reason for a put to fail."""
    rules = saver.retention
    by_count = rules.max_age is None and rules.max_bytes is None
    every = max(8, (rules.keep_latest or 1) // 4 if by_count else 0)
    if rules.keeps_all or not saver._records.due(thread, seq, every):
        return
    try:
        info = saver.store.task(thread)
        if not by_count and info is not None and seq % retention.all_every(info.checkpoints) >= every:
            return  # of many, few go: they are not all looked at in the life of each short process, nor at every eighth put
        found = items_of(saver, thread)
        hidden = hidden_of(saver, thread)
        found = [(item, header) for item, header in found if item.ref not in hidden]
        roots = [header.row for item, header in found if item.ns == ""]
        kept = {b.head.seq: "a head" for b in saver.store.branches(thread) if b.head.seq == seq}
        gone = set(retention.due(roots, rules, now(), kept))
        if gone:
            gone = set(retention.due(roots, rules, now(), kept, _unreadable(saver, thread, [row.seq for row in roots])))
        doomed = {row.id for row in roots if row.seq in gone}
        if doomed:
            remove(saver, thread, with_subgraphs([item for item, _ in found], doomed))
        if not by_count:
            # Half as many puts later all of them are looked at again, as with other tasks: a few for each put.
            saver._records.due(thread, seq + every, (len(found) - len(doomed)) // 2)
    except LeaseHeld:
        pass  # somebody has just taken the thread: what is due is due at the next put, too
    except SafepointError as error:
        log.warning("retention of thread %s failed: %s", thread, error)


def _unreadable(saver: SafepointSaver, thread: str, seqs: Sequence[int], ns: str = "") -> set[int]:
    """Those of falling ``seqs`` that are newer than the newest sound one. Damage must not use up what is fallen back to: they stay,
    and do not count."""
    bad: set[int] = set()
    for seq in seqs:
        if not saver.store.unreadable(thread, [seq], space=ns):
            break
        bad.add(seq)
    return bad


def copy(saver: SafepointSaver, source: str, target: str) -> None:
    check_id(target)
    taken = imaging.take(saver.store, source)
    if taken is None:
        raise NotFound(f"there is no thread {source!r}", "", "Nothing was copied.", task=source)
    row = replace(taken.image.row, task=target, status="idle", attempts=0, reason="")
    saver._records.forget(target)
    saver.store.write_task(replace(taken.image, row=row))
