"""The verbs that deal with the journal: calls and their settlement, pauses and their answers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from safepoint import recovering
from safepoint.checking import check_limit
from safepoint.codec import states, values
from safepoint.codec.registry import Registry
from safepoint.errors import AlreadyAnswered, Conflict, Damaged, NotFound, UsageError
from safepoint.model import CALL_STATUSES, Call, Done, NotDone, Pause, a_type, check_id, new_id, now, to_us
from safepoint.rows import CallRow, CallWrite, Commit, PauseRow, PauseWrite, replace
from safepoint.stores.base import Store

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer

log = logging.getLogger("safepoint")


class JournalVerbs:
    """Part of ``Checkpointer``."""

    store: Store
    registry: Registry

    if TYPE_CHECKING:

        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    def calls(self, task_id: str, *, status: str | None = None, limit: int | None = None) -> list[Call]:
        """The task's journal, oldest first, with arguments and results as plain values; ``limit`` keeps the newest.

        Of those in doubt, which a person is to settle, damaged records hide none that can be read: ``status="in_doubt"`` lists
        these, with empty arguments where only the arguments are lost, and the log says that there are damaged ones.

        Raises:
            Damaged: some records are, so that this would not be the whole journal.
        """
        if status is not None and status not in CALL_STATUSES:
            raise UsageError(f"no call has the status {status!r}", "", f"Use one of {', '.join(CALL_STATUSES)}.")
        check_limit("calls", limit)
        try:
            found = self._calls(check_id(task_id), status, limit if status is None else None)
        except Damaged as error:
            if status != "in_doubt" or error.details.get("rolled_back"):
                raise
            found = self._readable(task_id, status, error)
        return found if limit is None else found[max(0, len(found) - limit) :]

    def _calls(self, task_id: str, status: str | None, limit: int | None) -> list[Call]:
        rows, objects = self.store.calls(task_id, limit=limit)
        found = []
        for row in rows:
            row.check(task_id, f"call {row.no}")
            if status is None or row.status == status:
                found.append(states.call(task_id, row, objects, None))
        return found

    def _readable(self, task_id: str, status: str, error: Damaged) -> list[Call]:
        """Calls whose records are whole, of a task with some that are not."""
        cp = cast("Checkpointer", self)
        row = self.store.task(task_id)
        if row is None:
            raise error
        log.warning("records of calls of %s are damaged, and those not listed with the others: %s", task_id, error.what)
        rows = [r for r in recovering.survey(cp, row).calls if r.status == status]
        shown, _ = cp._shown(task_id, rows)
        return [shown[r.no] for r in rows]

    def resolve(self, task_id: str, call: int | Call, verdict: Done | NotDone) -> Call:
        """A person's word on a call that is in doubt: it happened (with this result), or it did not.

        Also on one that succeeded and whose result is missing, as it could not be stored or is damaged: ``Done(result)`` gives it one.

        Raises:
            NotFound: no such call. UsageError: nothing about it is in doubt. Conflict: somebody else was quicker.
        """
        if not isinstance(call, int | Call) or isinstance(call, bool):
            raise UsageError(f"resolve was given {a_type(call)} as the call", "", "Pass its number, or the Call itself.")
        no = call.no if isinstance(call, Call) else call
        if not isinstance(verdict, Done | NotDone):
            raise UsageError(f"resolve takes Done(result) or NotDone(), not {a_type(verdict)}", "", "Say what happened.")
        row = self._call_row(task_id, no)
        lost = row.status == "succeeded" and not self._has_result(task_id, row)
        if lost and isinstance(verdict, NotDone):
            raise UsageError(
                f"call {no} of task {task_id!r} succeeded, only its result is missing",
                "it happened, and is not made again",
                "Give it a result: Done(result).",
            )
        if row.status != "in_doubt" and not lost:
            raise UsageError(
                f"call {no} of task {task_id!r} is {row.status}, not in doubt",
                "only calls in doubt, and those whose result is missing, can be resolved",
                f"Resume the task first: whether it is in doubt is found out then (`safepoint plan {task_id}` tells)."
                if row.status == "started"
                else f"See `safepoint calls {task_id}`.",
            )
        packed = None
        if isinstance(verdict, Done):
            packed = states.pack_values({"result": verdict.result}, self.registry, None, "", flat=not self.store.chunked)
            row = replace(row, status="succeeded", result=packed.data, result_refs=packed.refs, not_done=False, error=None)
        else:
            row = replace(row, status="failed", not_done=True)
        row = replace(row, finished_at=to_us(now()), reason="settled by a person")
        self.store.commit(
            Commit(
                task=task_id,
                id=new_id(),
                anyway=True,
                calls=(CallWrite(row, "ended"),),
                objects=packed.new if packed else (),
            )
        )
        rows, objects = self.store.calls(task_id, nos=[no])
        return states.call(task_id, rows[0], objects, None)

    def _has_result(self, task_id: str, row: CallRow) -> bool:
        """Whether a call that succeeded has a result that can be read."""
        if row.result is None:
            return False
        try:
            rows, objects = self.store.calls(task_id, nos=[row.no])
            states.unpack_values(rows[0].result or b"", rows[0].result_refs, objects, None)
        except Damaged:
            return False
        return True

    def _call_row(self, task_id: str, no: int) -> CallRow:
        rows, _ = self.store.calls(check_id(task_id), nos=[no], bodies=False)
        if not rows:
            raise NotFound(f"task {task_id!r} has no call {no}", "", f"See `safepoint calls {task_id}`.", task=task_id)
        rows[0].check(task_id, f"call {no}")
        return rows[0]

    def pauses(self, task_id: str, *, status: str | None = "open") -> list[Pause]:
        """Questions to people; open ones by default, all with ``status=None``."""
        rows = self.store.pauses(check_id(task_id))
        for row in rows:
            row.check(task_id, f"pause {row.no}")
        return [self._pause(task_id, r) for r in rows if status is None or r.status == status]

    def answer(self, task_id: str, pause: int | str | Pause, answer: Any) -> Pause:
        """Answer a pause, named by its number or, if just one of that name is open, by its name. The first answer stands.

        Raises:
            NotFound: no such pause. AlreadyAnswered: it has its answer.
        """
        if not isinstance(pause, int | str | Pause) or isinstance(pause, bool):
            raise UsageError(f"answer was given {a_type(pause)} as the pause", "", "Pass its number or its name.")
        row = self._pause_row(task_id, pause.no if isinstance(pause, Pause) else pause)
        if row.status != "open":
            raise self._answered(task_id, row)
        row = replace(
            row, status="answered", answer=values.encode(answer, self.registry, path="answer"), answered_at=to_us(now())
        )
        answered = self._pause(task_id, row)  # before the commit: a question that cannot be read must not raise after it
        try:
            self.store.commit(Commit(task=task_id, id=new_id(), anyway=True, pauses=(PauseWrite(row),)))
        except Conflict:
            raise self._answered(task_id, row) from None
        return answered

    def _pause(self, task_id: str, row: PauseRow) -> Pause:
        return states.pause(task_id, row, self.registry)

    def _pause_row(self, task_id: str, which: int | str) -> PauseRow:
        rows = self.store.pauses(check_id(task_id))
        found = [r for r in rows if (r.no == which if isinstance(which, int) else r.name == which)]
        if isinstance(which, str) and len(found) > 1:
            found = [r for r in found if r.status == "open"] or found[-1:]
        if len(found) > 1:
            raise UsageError(
                f"task {task_id!r} has {len(found)} open pauses named {which!r}", "", "Answer by number; see pauses()."
            )
        if not found:
            raise NotFound(f"task {task_id!r} has no pause {which!r}", "", "See pauses().", task=task_id)
        return found[0]

    @staticmethod
    def _answered(task_id: str, row: PauseRow) -> AlreadyAnswered:
        return AlreadyAnswered(
            f"pause {row.no} ({row.name!r}) of task {task_id!r} has been answered before",
            "the first answer stands",
            "",
            task=task_id,
            pause=row.no,
        )
