"""What has to go, and what has to stay unseen, when checkpoints of a thread are deleted; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from safepoint.rows import BranchRow, BranchWrite, Head

__all__ = ["Item", "Plan", "Ref", "beyond_latest", "is_call", "plan", "with_subgraphs"]

Ref = tuple[str, str]
"""Namespace and checkpoint id."""


class Item(NamedTuple):
    """A checkpoint, as far as deleting looks at it."""

    ns: str
    id: str
    seq: int
    parent: str | None
    root: str | None
    """The checkpoint of the root graph that it ran under."""
    deltas: frozenset[str]
    """Delta channels that were written since they were stored whole: what they are made of lies in the checkpoints before."""
    run_id: str | None = None

    @property
    def ref(self) -> Ref:
        return self.ns, self.id


@dataclass(slots=True)
class Plan:
    gone: dict[str, list[int]] = field(default_factory=dict)
    """Numbers by namespace."""
    hidden: list[Ref] = field(default_factory=list)
    """Of those that are deleted, the ones that must stay where they are."""
    moves: list[BranchWrite] = field(default_factory=list)
    current: str | None = None
    """The root graph's branch with the newest checkpoint then; None if nothing of the root graph is left."""

    def __bool__(self) -> bool:
        return bool(self.gone or self.hidden or self.moves)


def is_call(ns: str) -> bool:
    """Whether a namespace is that of one call of a subgraph, and not of a subgraph that keeps its state over many."""
    return ":" in ns


def with_subgraphs(items: Iterable[Item], doomed: Collection[str], *, keep_newest: bool = True) -> set[Ref]:
    """The root graph's checkpoints ``doomed``, and those of subgraphs that ran under them. Of a subgraph that keeps its state the newest
    stays, as its next call goes on from it."""
    items = list(items)
    roots = {item.id for item in items if item.ns == ""}
    newest: dict[str, int] = {}
    for item in items:
        newest[item.ns] = max(newest.get(item.ns, 0), item.seq)
    found: set[Ref] = set()
    for item in items:
        under = item.id if item.ns == "" else item.root
        if under is None or (under in roots and under not in doomed):
            continue
        if item.ns == "" or is_call(item.ns) or not keep_newest or item.seq != newest[item.ns]:
            found.add(item.ref)
    return found


def beyond_latest(items: Iterable[Item]) -> set[Ref]:
    """All but the newest of each namespace; of a subgraph's call nothing, if the root checkpoint that it ran under goes."""
    items = list(items)
    newest: dict[str, Item] = {}
    for item in items:
        if item.ns not in newest or item.seq > newest[item.ns].seq:
            newest[item.ns] = item
    top = newest.get("")
    kept = {
        item.ref for item in newest.values() if not is_call(item.ns) or item.root is None or top is None or item.root == top.id
    }
    return {item.ref for item in items} - kept


def plan(items: Iterable[Item], branches: Iterable[BranchRow], doomed: Collection[Ref], hidden: Collection[Ref] = ()) -> Plan:
    """How to delete ``doomed``.

    Args:
        items: All checkpoints of the thread.
        branches: Of all namespaces.
        hidden: Those that were deleted earlier and had to stay: they go as soon as nothing needs them any more.
    """
    by_ref = {item.ref: item for item in items}
    dead = {ref for ref in {*doomed, *hidden} if ref in by_ref}
    living = [item for item in by_ref.values() if item.ref not in dead]
    needed = _needed(living, by_ref, dead)
    found = Plan(hidden=sorted(needed - set(hidden)))
    gone: dict[str, list[int]] = defaultdict(list)
    for ref in dead - needed:
        gone[ref[0]].append(by_ref[ref].seq)
    found.gone = {ns: sorted(seqs) for ns, seqs in gone.items()}
    found.moves, found.current = _moves(by_ref, dead, list(branches))
    return found


def _needed(living: Iterable[Item], by_ref: Mapping[Ref, Item], dead: Collection[Ref]) -> set[Ref]:
    """Of the dead, what the delta channels of the living are made of: back to where each was stored whole, that one included."""
    needed: set[Ref] = set()
    seen: set[tuple[Ref, frozenset[str]]] = set()
    for item in living:
        wanted, at = item.deltas, item.parent
        while wanted and at is not None and (there := by_ref.get((item.ns, at))) is not None:
            if (there.ref, wanted) in seen:
                break
            seen.add((there.ref, wanted))
            if there.ref in dead:
                needed.add(there.ref)
            wanted &= there.deltas
            at = there.parent
    return needed


def _moves(
    by_ref: Mapping[Ref, Item], dead: Collection[Ref], branches: list[BranchRow]
) -> tuple[list[BranchWrite], str | None]:
    """Each branch whose head goes is set back to the next one that stays, if that is no other branch's, and else dropped."""
    parents = {(item.ns, item.parent) for item in by_ref.values() if item.ref not in dead}
    heads: dict[tuple[str, str], Head | None] = {(b.space, b.name): b.head for b in branches}
    taken = {(b.space, b.head.id) for b in branches if (b.space, b.head.id) not in dead}
    moves: list[BranchWrite] = []
    for branch in sorted(branches, key=lambda b: -b.head.seq):
        ns = branch.space
        if (ns, branch.head.id) not in dead:
            continue
        at: str | None = branch.head.id
        while at is not None and (ns, at) in dead:
            at = by_ref[ns, at].parent
        to = by_ref.get((ns, at)) if at is not None else None
        # One with a child that stays is no end of a line, unless it has no branch of its own to be reached by.
        if to is not None and (to.ref in taken or to.ref in parents):
            to = None
        head = None if to is None else Head(to.seq, to.id)
        if to is not None:
            taken.add(to.ref)
        heads[ns, branch.name] = head
        moves.append(BranchWrite(space=ns, name=branch.name, expect=branch.head, to=head))
    left = [(head.seq, name) for (ns, name), head in heads.items() if ns == "" and head is not None]
    return moves, max(left)[1] if left else None
