"""Named steps: which product may be used again, which step has to run, and what falls with it; pure.

A product has a *version*. That of a pure step is what the product is; that of any other is a number that no product had before,
so that whatever was made from the one before is out of date. A product is *sound* if each product that it was made from is
still there in the version that it was made from, and sound itself. Only a sound product is ever used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Version = tuple[int, bytes]

MADE, FAILED, SKIPPED = "made", "failed", "skipped"
LOST, FALLEN = "lost", "fallen"
STANDINGS: tuple[str, ...] = (MADE, FAILED, SKIPPED, LOST, FALLEN)

WITHOUT: Version = (0, b"lost")
"""In place of a version: the step ran without the product, which was lost, and whose step is optional."""


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(b"p1" + data).digest()[:16]


@dataclass(frozen=True, slots=True)
class Made:
    """What is recorded of a step beside its product.

    Attributes:
        fingerprint: Digest of its name and arguments.
        needs: The version of each product that it was made from.
        number: 0 for a pure or skipped step, else one that no product of this task had before.
        digest: Of the product.
        status: ``made``, or without a product: ``failed`` (of an optional step) or ``skipped`` (by its rule).
        reads: Numbers of the calls it made that change nothing.
        writes: Numbers of its other calls.
        error: Type of what it failed with.
    """

    fingerprint: bytes
    needs: Mapping[str, Version]
    number: int
    digest: bytes
    status: str
    pure: bool = False
    optional: bool = False
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    error: str = ""

    @property
    def version(self) -> Version:
        return (self.number, self.digest)

    def encode(self) -> list[Any]:
        """As it is stored."""
        return [
            self.fingerprint,
            {name: list(version) for name, version in self.needs.items()},
            self.number,
            self.digest,
            self.status,
            [name for name in ("pure", "optional") if getattr(self, name)],
            [list(self.reads), list(self.writes)],
            self.error,
        ]

    @classmethod
    def decode(cls, parts: Any) -> Made | None:
        """None for what is no such record, because a person has edited it: that step was not made."""
        try:
            fingerprint, needs, number, digest, status, flags, (reads, writes), error = parts
            versions = {name: (n, d) for name, (n, d) in needs.items()}
            whole = (
                type(number) is int
                and type(fingerprint) is type(digest) is bytes
                and status in (MADE, FAILED, SKIPPED)
                and all(type(n) is int and type(d) is bytes for n, d in versions.values())
                and all(type(n) is int for n in (*reads, *writes))
            )
            pure, optional = "pure" in flags, "optional" in flags
        except (TypeError, ValueError, AttributeError):
            return None
        if not whole:
            return None
        return cls(fingerprint, versions, number, digest, status, pure, optional, tuple(reads), tuple(writes), str(error))


class Action(StrEnum):
    REUSE = "reuse"
    RUN = "run"
    SKIP = "skip"
    UNKNOWN = "unknown"
    """It needs a product that there is not."""
    BLOCKED = "blocked"
    """A product that it needs has to be made anew first."""


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    why: str
    need: str = ""
    """The product that stands in the way."""
    lost: bool = False
    """It runs again although nothing has changed: what it did then is on record, and must not be done twice."""


class Book:
    """What is recorded of the steps of a task.

    Args:
        made: By name.
        lost: Names whose product cannot be read, or is gone.
    """

    def __init__(self, made: Mapping[str, Made], lost: Iterable[str] = ()) -> None:
        self.made = made
        self.lost = frozenset(lost)
        self._sound: dict[str, bool] = {}

    def decide(
        self, name: str, fingerprint: bytes, needs: Iterable[str], *, optional: bool = False, skip: bool = False
    ) -> Decision:
        """What becomes of a step that the program has reached."""
        needs = tuple(needs)
        if skip:
            return Decision(Action.SKIP, "its rule says so")
        for need in needs:
            if need not in self.made:
                return Decision(Action.UNKNOWN, f"{need!r} has not been made", need)
            if self._gone(need):
                return Decision(Action.BLOCKED, f"the product of {need!r} is lost", need)
            if not self.sound(need):
                return Decision(Action.BLOCKED, f"{need!r} is out of date: what it was made from has changed", need)
        why, lost = self._why_anew(name, fingerprint, needs, optional)
        if not why:
            return Decision(Action.REUSE, "nothing has changed")
        for need in needs:
            if need in self.lost and not self.made[need].optional:
                return Decision(Action.BLOCKED, f"the product of {need!r} is lost", need)  # pure: fine until it is asked for
        return Decision(Action.RUN, why, lost=lost)

    def _why_anew(self, name: str, fingerprint: bytes, needs: tuple[str, ...], optional: bool) -> tuple[str, bool]:
        """Why the step has to run, or ``""``; and whether it is only because its product is lost."""
        there = self.made.get(name)
        if there is None:
            return "it has not been made", False
        if there.fingerprint != fingerprint:
            return "its arguments have changed", False
        if there.status == SKIPPED:
            return "it was skipped", False
        if there.status == FAILED and not optional:
            return "it failed, and is not optional any more", False
        if set(needs) != there.needs.keys():
            return "it needs other products than when it was made", False
        for need in needs:
            if there.needs[need] not in self._accepted(need):
                return f"{need!r} has changed", False
        if name in self.lost:
            return "its product is lost", True
        return "", False

    def _accepted(self, name: str) -> tuple[Version, ...]:
        """The versions of a product that what is made from it may stand on."""
        there = self.made[name]
        return (there.version, WITHOUT) if name in self.lost and there.optional else (there.version,)

    def _gone(self, name: str) -> bool:
        """Lost, and no rule says that one may go on without it."""
        return name in self.lost and not (self.made[name].pure or self.made[name].optional)

    def sound(self, name: str) -> bool:
        """Whether the product follows from what it was made from. (Whether it can be read is another question.)"""
        if name not in self._sound:
            self._sound[name] = False  # in a circle, which only an edited record can have, nothing is sound
            self._sound[name] = all(
                need in self.made and version in self._accepted(need) and not self._gone(need) and self.sound(need)
                for need, version in self.made[name].needs.items()
            )
        return self._sound[name]

    def standing(self, name: str) -> str:
        """``made``, ``failed``, ``skipped``, ``lost``, or ``fallen``: to be made anew because of what it was made from."""
        if name in self.lost:
            return LOST
        return self.made[name].status if self.sound(name) else FALLEN

    def standings(self) -> dict[str, str]:
        return {name: self.standing(name) for name in self.made}

    def versions(self, needs: Iterable[str]) -> dict[str, Version]:
        """What a step that runs now is made from."""
        return {need: WITHOUT if need in self.lost else self.made[need].version for need in needs}

    def next_number(self) -> int:
        """One that no product had, not even one of which nothing but a mention is left."""
        numbers = [n for m in self.made.values() for n in (m.number, *(v[0] for v in m.needs.values()))]
        return max(numbers, default=0) + 1

    def circle(self, name: str, needs: Iterable[str]) -> tuple[str, ...]:
        """The way from ``name`` through its needs back to it; empty if there is none."""
        ways: list[tuple[str, ...]] = [(name, need) for need in needs]
        seen: set[str] = set()
        while ways:
            way = ways.pop()
            if way[-1] == name:
                return way
            if way[-1] in seen or way[-1] not in self.made:
                continue
            seen.add(way[-1])
            ways += [(*way, need) for need in self.made[way[-1]].needs]
        return ()

    def dependants(self, name: str) -> tuple[str, ...]:
        """Every step that was made from this one's product, directly or by way of others."""
        found: set[str] = set()
        new = {name}
        while new:
            new = {n for n, m in self.made.items() if n not in found and m.needs.keys() & new}
            found |= new
        return tuple(sorted(found - {name}))
