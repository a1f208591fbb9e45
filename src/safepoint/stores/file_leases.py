"""The lease verbs of the file store: a file beside the tasks that says who holds one, and a locked byte that proves it.

As with SQLite there is no heartbeat and no clock; see ``sqlite_leases``. Leases lie outside the tasks' folders and are not for
git: whoever checks out an earlier moment, or deletes a task's folder, brings back no fence. The journal has the highest fence
too, for the day on which the leases themselves are gone.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from safepoint import _probe
from safepoint.errors import Damaged
from safepoint.model import check_id
from safepoint.rows import Grant, Guard, LeaseRow, TaskPatch, replace
from safepoint.stores import filenames, folding, refusals
from safepoint.stores import holder as people
from safepoint.stores.file_folder import LEASE_BYTES, LEASES, Folders
from safepoint.stores.file_journal import Book
from safepoint.stores.file_rows import checksum
from safepoint.stores.oslock import Claim

__all__ = ["FileLeases", "now"]

_FLOOR = ".floor"
_json = msgspec.json.Encoder().encode


class _Lease(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    fence: int
    token: str
    lease_id: int
    locks: str
    state: str
    holder: bytes
    acquired_at: int
    presumed: int = 0


def now() -> int:
    return time.time_ns() // 1000


class FileLeases:
    """Needs ``_f`` and ``_claims`` from the store."""

    _f: Folders
    _claims: dict[int, Claim]

    # -- the files

    def _lease(self, root: int, task: str) -> _Lease | None:
        name = filenames.encode(task)
        found: _Lease | None = self._kept_file(root, name, _Lease)
        if found is not None and found.task != task:
            raise _damaged(name)
        return found

    def _kept_file(self, root: int, name: str, form: type[Any]) -> Any:
        ops = self._f.ops
        try:
            with ops.opened(ops.child(LEASES, root)) as fd:
                data = self._f.get(name, fd)
        except FileNotFoundError:
            return None
        body, _, sum = data.rpartition(b" ")
        if sum.strip().decode("latin-1") != checksum(body):
            raise _damaged(name)
        try:
            return msgspec.json.decode(body, type=form)
        except msgspec.DecodeError as error:
            raise _damaged(name) from error

    def _put_lease(self, root: int, name: str, content: Any, byte: int) -> None:
        body = _json(content)
        with self._f.ops.opened(self._f.ops.child(LEASES, root, create=True)) as fd:
            self._f.put(root, name, b"%s %s\n" % (body, checksum(body).encode()), fd, byte=byte)

    def _floor(self, root: int) -> int:
        """The highest fence of a deleted task."""
        found = self._kept_file(root, _FLOOR, dict[str, int])
        return 0 if found is None else int(found.get("fence", 0))

    def _raise_floor(self, root: int, fence: int, byte: int) -> None:
        with self._f.lock(_FLOOR, _FLOOR):
            if fence > self._floor(root):
                self._put_lease(root, _FLOOR, {"fence": fence}, byte)

    # -- for the other verbs

    def _is_live(self, lease: _Lease | None) -> bool | None:
        if lease is None or lease.state != "held":
            return False
        return self._f.locks.is_held(lease.lease_id, lease.locks)

    def _refuse_if_held(self, root: int, task: str) -> None:
        lease = self._lease(root, task)
        if lease is not None and self._is_live(lease):
            raise people.lease_held(task, lease.holder, lease.acquired_at)

    def _check_guard(self, root: int, task: str, guard: Guard) -> None:
        lease = self._lease(root, task)
        held = lease is not None and lease.state == "held"
        if lease is None or not held or (lease.fence, lease.token) != guard or not self._is_live(lease):
            raise refusals.lost(task, guard, lease.fence if lease is not None and held else None)

    def _live_fence(self, root: int, task: str) -> int | None:
        lease = self._lease(root, task)
        return lease.fence if lease is not None and self._is_live(lease) is not False else None

    # -- verbs

    def acquire(self, task: str, holder: bytes, *, steal: bool = False) -> Grant:
        check_id(task)
        f = self._f
        # Before the lease names it: one whose byte is free means that its holder is dead.
        claim = None
        while claim is None:
            f.usable()
            claim = f.locks.claim(secrets.randbits(LEASE_BYTES))
        _probe.at("acquire.locked")
        try:
            name = filenames.encode(task)
            with f.root() as root, f.lock(name, task):
                with f.mutex:
                    book = f.book(root, task, writer=True)
                lease = self._lease(root, task)
                grant = self._judged(root, task, book, lease, claim, steal)
                row = _Lease(
                    task=task,
                    fence=grant.guard.fence,
                    token=grant.guard.token,
                    lease_id=claim.byte,
                    locks=claim.file,
                    state="held",
                    holder=bytes(holder),
                    acquired_at=now(),
                    presumed=grant.presumed,
                )
                folder, kept = f.begin(root, task, now())
                with f.ops.opened(folder):
                    self._put_lease(root, name, row, f.byte(name))
                    _probe.at("acquire.lease")
                    try:
                        before = kept.book.row
                        mine = replace(before, status="running", attempts=before.attempts + 1, updated_at=now())
                        f.append(root, folder, task, kept, kept.book.mark(now(), mine, fence=row.fence))
                    except BaseException:
                        self._put_back(root, name, lease)
                        raise
            _probe.at("acquire.after")
            self._claims[claim.byte] = claim
            return grant
        except BaseException:
            claim.free()
            raise

    def _judged(self, root: int, task: str, book: Book | None, lease: _Lease | None, claim: Claim, steal: bool) -> Grant:
        """What the new lease is to be, and how the last one ended."""
        known = book.fence if book is not None else 0
        presumed = 0
        if lease is None:
            previous, fence = "", max(known, self._floor(root))
            if known:
                # It is told of in the journal, and the file that would prove its end is not here: a clone, or it was deleted.
                assert book is not None
                previous = "released"
                if book.row.status == "running":
                    previous, presumed = "presumed_dead", known
        else:
            fence, presumed = max(lease.fence, known), lease.presumed
            live = self._is_live(lease)
            if lease.state == "released":
                previous = "released"
            elif live is False:
                previous = "dead"
            elif steal or live is None:
                previous, presumed = "presumed_dead", lease.fence
            else:
                raise people.lease_held(task, lease.holder, lease.acquired_at)
        return Grant(Guard(fence + 1, secrets.token_hex(16)), previous, presumed, claim)

    def _put_back(self, root: int, name: str, lease: _Lease | None) -> None:
        """The lease before one that could not be recorded. If that fails too, it is that of a dead holder."""
        try:
            if lease is not None:
                self._put_lease(root, name, lease, self._f.byte(name))
            else:
                with self._f.ops.opened(self._f.ops.child(LEASES, root)) as fd:
                    self._f.ops.unlink(name, fd)
        except OSError:
            pass

    def release(self, task: str, grant: Grant, patch: TaskPatch | None = None) -> None:
        f, name = self._f, filenames.encode(task)
        with f.root() as root, f.lock(name, task):
            lease = self._lease(root, task)
            if lease is not None and (lease.fence, lease.token, lease.state) == (*grant.guard, "held"):
                with f.mutex:
                    kept = f.journal(root, task, writer=True)
                if kept is not None and kept.book.exists:
                    with f.ops.opened(f.ops.child(name, root)) as folder:
                        row = replace(folding.patched(kept.book.row, patch), updated_at=now())
                        f.append(root, folder, task, kept, kept.book.mark(now(), row))
                _probe.at("release.patched")
                self._put_lease(root, name, msgspec.structs.replace(lease, state="released"), f.byte(name))
        # After the file: the other way round, the holder would look dead for a moment.
        self.abandon(task, grant)
        _probe.at("release.after")

    def abandon(self, task: str, grant: Grant) -> None:
        if isinstance(grant.handle, Claim):
            self._claims.pop(grant.handle.byte, None)
            try:
                grant.handle.free()
            except OSError:
                pass  # the kernel refuses no unlocking of a range that is ours; if it did, only our end would free it

    def lease(self, task: str) -> LeaseRow | None:
        with self._f.root() as root:
            lease = self._lease(root, task)
            if lease is None:
                return None
            with self._f.mutex:
                if self._f.book(root, task) is None:
                    return None  # of a task whose folder is gone; what it says of fences is kept
        live = self._is_live(lease) is True
        return LeaseRow(
            task=task,
            fence=lease.fence,
            token=lease.token,
            lease_id=lease.lease_id,
            state=lease.state,
            holder=lease.holder,
            acquired_at=lease.acquired_at,
            presumed=lease.presumed,
            live=live,
            stopped=live and people.is_stopped(people.read(lease.holder)),
        )

    def holds(self, task: str, guard: Guard) -> bool:
        with self._f.root() as root:
            lease = self._lease(root, task)
        return lease is not None and (lease.fence, lease.token, lease.state) == (*guard, "held") and bool(self._is_live(lease))


def gapped(task: str, book: Book) -> Damaged:
    name = f"{filenames.encode(task)}/{filenames.JOURNAL}"
    gap = book.gaps[0]
    more = f", and {len(book.gaps) - 1} more" if len(book.gaps) > 1 else ""
    return Damaged(
        f"line {gap.line} of {name} is damaged{more}",
        gap.why,
        "Restore the file (git checkout, a backup), or take what can be read with `safepoint repair`.",
        task=task,
        lines=[gap.line for gap in book.gaps],
    )


def _damaged(name: str) -> Damaged:
    return Damaged(
        f"{LEASES}/{name} is damaged",
        "it says who holds a task, and cannot be read",
        "Make sure that no run of it lives, and delete that file: fences go on from the journal.",
    )
