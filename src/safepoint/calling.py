"""How a call is made: matched with the journal, recorded before it runs, settled when its outcome is unknown."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from safepoint._probe import at
from safepoint.codec import chunks, states, values
from safepoint.codec.chunks import Packed
from safepoint.errors import (
    CallFailed,
    CallInProgress,
    CallMismatch,
    Conflict,
    Damaged,
    LeaseLost,
    RefusedType,
    RunEnded,
    SafepointError,
    StoreFull,
    Unavailable,
    UsageError,
)
from safepoint.flow import FlowBase
from safepoint.model import check_id, new_id, now, to_us
from safepoint.replies import damaged_error, error_record, failed_error, get, in_doubt_error, lost_error, usage_of
from safepoint.rows import CallRow, CallWrite, Commit, replace
from safepoint.rules import journal, quarantine
from safepoint.rules.collecting import is_stream
from safepoint.rules.journal import Action, Found, Match, Request
from safepoint.script import Exec, Io, Pass, Raised, Script, Sleep, Together
from safepoint.streaming import Feed, close_feeds
from safepoint.tools import Bound, Tool, sole

_CANONICAL_LIMIT = 256 * 1024
_CANONICAL_LIMIT_READ = 4 * 1024
"""Above these sizes arguments are compared as they are stored, key order and all: the whole history of a model call is
not walked again at each call. For a write a miss is safe: it parks."""

Validate = Callable[[Any], Any]


@dataclass(slots=True, repr=False)
class _Asked:
    """A call as the step asked for it, with everything made ready."""

    tool: Tool[Any, Any]
    arguments: dict[str, Any]
    request: Request
    packed: Packed
    asked: int
    failures: int = 0
    no: int | None = 0
    """Number of its row; 0 until one is found or written, None where another call holds it."""
    closed: bool = False
    """Its claim has been given back or settled. Ctrl-C may keep the one who serves it from that; then the caller does it."""
    feed: Feed | None = None
    """Where the chunks of a stream go."""
    got: bool = False
    """It has a value for the step, which has reached it unless what it was asked for with raises."""


@dataclass(slots=True, repr=False)
class Flow(FlowBase):
    """The calls of a run."""

    # -- asking

    def ask(self, tool: Tool[Any, Any], arguments: dict[str, Any], call_id: str | None) -> _Asked:
        if not isinstance(tool, Tool):
            raise UsageError(
                f"run.call was given a {type(tool).__name__}",
                "what a call does to the world must be declared",
                "Decorate the function with @safepoint.tool or @safepoint.model.",
            )
        sole(tool)
        if call_id is not None:
            check_id(call_id, "call_id")
        packed = states.pack_call(
            arguments,
            self.cp.registry,
            self.base.packed if self.base else None,
            self.warm,
            f"arguments of {tool.name}",
            flat=not self.cp.store.chunked,
        )
        self.warm = (packed,)
        limit = _CANONICAL_LIMIT_READ if tool.effect == "read" else _CANONICAL_LIMIT
        plain = None
        if packed.size <= limit:
            data = values.encode(arguments, self.cp.registry, depth=chunks.DEPTH)
            plain = journal.canonical(values.decode_plain(data, depth=chunks.DEPTH))
        elif self.cp.store.chunked:
            plain = packed.digest
        else:
            # As every other store names it: the task may have come from one, or go to one.
            plain = chunks.pack(arguments, self.cp.registry).digest
        operation = tool.operation(arguments)
        request = Request(
            tool=tool.name,
            effect=tool.effect,
            ident=journal.ident_of(tool.name, plain),
            call_id=call_id,
            scope=self.journal.scope,
            op_key=None if operation is None else self._op_key(tool, operation),
            replan=tool.policy.replan,
        )
        return _Asked(tool, arguments, request, packed, self.seen)

    def _op_key(self, tool: Tool[Any, Any], operation: Any) -> bytes:
        tree = values.decode_plain(values.encode(operation, self.cp.registry, path=f"key of {tool.name}"))
        return journal.ident_of(tool.name, journal.canonical(tree))

    def call(
        self,
        tool: Tool[Any, Any],
        arguments: dict[str, Any],
        call_id: str | None,
        validate: Validate | None,
        feed: Feed | None = None,
    ) -> Script[Any]:
        self._fits(tool, validate, feed)
        yield from close_feeds(self.feeds, left=True)
        if self.unwritten or self.unsure:
            yield Io(self.flush)
        asked = self.ask(tool, arguments, call_id)
        asked.feed = feed
        try:
            return (yield from self._serve(asked, self._match([asked])[0], validate))
        finally:
            if not asked.closed:
                self._over(asked, delivered=False)

    def _match(self, asked: Sequence[_Asked]) -> list[Found]:
        with self.lock:
            delivered, named = self.journal.delivered.copy(), self.journal.named.copy()
            try:
                found = self.journal.match([a.request for a in asked])
                for a, f in zip(asked, found, strict=True):
                    if f.kind is not Match.NEW:
                        a.no = f.row.no if f.kind is Match.RECORDED and f.row is not None else None
            except BaseException:  # Ctrl-C: nothing is claimed by nobody
                self.journal.delivered, self.journal.named = delivered, named
                for a in asked:
                    a.no = 0
                raise
        return found

    def call_many(self, calls: Sequence[Bound], width: int, return_errors: bool) -> Script[list[Any]]:
        if type(width) is not int or width < 1:
            raise UsageError("max_parallel must be an int of at least 1", "", "")
        for c in calls:
            if not isinstance(c, Bound):
                raise UsageError(f"call_many was given a {type(c).__name__}", "", "Pass tool.bind(…) for each call.")
            self._fits(c.tool, None)
        if not calls:
            return []
        if self.unwritten or self.unsure:
            yield Io(self.flush)
        asked = [self.ask(c.tool, c.arguments, c.call_id) for c in calls]
        reached = False
        try:
            found = self._match(asked)
            outcomes = yield Together([self._serve(a, f, None) for a, f in zip(asked, found, strict=True)], width)
            models = [a.no for a in asked if a.tool.policy.model and a.no]
            if len(models) > 1:
                # Nothing tells which of these replies a later call belongs to, and ids count within one.
                self.journal.scope = -max(models)
            errors = [o.error for o in outcomes if isinstance(o, Raised)]
            # What ends the run, and interrupts, come before what a tool reported.
            for error in sorted(errors, key=lambda e: isinstance(e, Exception)):
                if not (return_errors and isinstance(error, CallFailed)):
                    raise error
            reached = True
            return [o.error if isinstance(o, Raised) else o for o in outcomes]
        finally:
            for a in asked:
                # Results that an exception took the place of have reached nobody: who asks again gets them.
                if not a.closed or (a.got and not reached):
                    self._over(a, delivered=False)

    def _fits(self, tool: Tool[Any, Any], validate: Validate | None, feed: Feed | None = None) -> None:
        self.check()
        if isinstance(tool, Tool) and tool.streams and feed is None:
            raise UsageError(f"model {tool.name!r} is a generator", "a call has one result", "Use run.stream.")
        if isinstance(tool, Tool) and tool.effect == "transactional" and not self.cp.store.transactional_tools:
            raise UsageError(
                f"{tool.name!r} is transactional, and {type(self.cp.store).__name__} has no transactions to lend",
                "effect and record cannot be one there",
                "Use SQLite or PostgreSQL, or declare the tool as idempotent or write.",
            )
        if validate is not None and isinstance(tool, Tool) and tool.effect not in ("read", "idempotent"):
            raise UsageError(
                f"validate= does not fit {tool.name!r}",
                f"its effect is {tool.effect}: it happened, whatever the reply looks like, and cannot be asked again",
                "Check the result after the call.",
            )

    # -- serving

    def _over(self, asked: _Asked, *, delivered: bool, told: bool = False) -> None:
        if asked.no is not None:
            with self.lock:
                self.journal.over(asked.request, asked.no, delivered=delivered, told=told)
        asked.closed = True

    def _serve(self, asked: _Asked, found: Found, validate: Validate | None) -> Script[Any]:
        """Answer a call. What it claims of the journal is given back unless its outcome has reached the step."""
        try:
            value = yield from self._answer(asked, found, validate)
            yield Pass()
            asked.got = True
            self._over(asked, delivered=True)
            return value  # from here to the step's own line nothing is called, so no Ctrl-C comes between
        except CallFailed:
            self._over(asked, delivered=True)
            raise
        except RefusedType as error:
            self._over(asked, delivered=False, told=error.details.get("call") == asked.no)  # it succeeded, without a result
            raise
        except BaseException:
            self._over(asked, delivered=False)
            raise

    def _answer(self, asked: _Asked, found: Found, validate: Validate | None) -> Script[Any]:
        tool, row = asked.tool, found.row
        self.check()
        if found.kind is Match.MISMATCH:
            raise CallMismatch(
                f"call id {asked.request.call_id!r} came with other arguments",
                f"within one model reply it already names call {row.no if row else '?'}",
                "Give each call of a reply an id of its own.",
                task=self.task,
            )
        if found.kind is Match.BUSY:
            raise CallInProgress(
                f"call id {asked.request.call_id!r} is being executed",
                "the same call was made at the same time",
                "Wait for the first one.",
            )
        if found.kind is Match.PARK and row is not None:
            yield from self._park(asked, self._why_parked(asked, row))
        if row is None and (why := self.kept_back(tool)):
            yield from self._park(asked, why)
        while True:
            past = self.later or (row is not None and self.journal.past(row))
            match journal.decide(row, past=past, now_us=to_us(now())):
                case Action.REUSE if row is not None:
                    try:
                        value = yield Io(lambda row=row: self._recorded(row))  # type: ignore[misc]
                    except Damaged as error:
                        if error.details.get("rolled_back"):
                            raise
                        if row.effect in journal.HAPPENS:
                            raise damaged_error(self.task, row, error) from error
                        return (yield from self._execute(asked, row, validate))
                    if tool.policy.model:
                        self.journal.scope = row.no
                    return value
                case Action.LOST if row is not None:
                    raise lost_error(self.task, row)
                case Action.RAISE if row is not None:
                    self.seen = max(self.seen, row.ended or 0)
                    raise failed_error(row)
                case Action.PARK if row is not None and row.status != "started":
                    self.end(in_doubt_error(self.task, row))
                case Action.VERIFY | Action.PARK if row is not None:
                    try:
                        row = yield from self.settle(row, tool)
                    except BaseException as error:
                        self.left_open(row.no, error)
                    if row.status == "in_doubt":
                        self.end(in_doubt_error(self.task, row))
                case _:
                    if row is not None and row.not_done and self.kept_back(tool):
                        yield from self._not_overtaken(row)
                    return (yield from self._execute(asked, row, validate))

    def _not_overtaken(self, row: CallRow) -> Script[None]:
        """Before a call is made because it is on record that it was not: put it before a person again, and end the run, if it
        was made on another journal of the task since."""
        rows, _ = yield Io(lambda: self.cp.store.calls(self.task, bodies=False))
        other = journal.overtaken(row, rows)
        if other is not None:
            reason = f"said to be not done before call {other.no} was made on another branch, which is the same"
            parked = replace(row, status="in_doubt", not_done=False, reason=reason)
            done = yield Io(lambda: self.commit(self._calls(CallWrite(parked))))
            self.end(in_doubt_error(self.task, done.calls[0]))

    def _park(self, asked: _Asked, reason: str) -> Script[None]:
        """Record a call that is not made before a person says so, and end the run."""
        parked = replace(self._intent(asked, None), status="in_doubt", attempts=0, reason=reason)
        done = yield Io(lambda: self.commit(self._calls(CallWrite(parked), objects=asked.packed.new)))
        self.end(in_doubt_error(self.task, done.calls[0]))

    @staticmethod
    def _why_parked(asked: _Asked, row: CallRow) -> str:
        if row.ident == asked.request.ident:
            return f"not sent: call {row.no}, equal to it, happened in an earlier attempt of another step"
        return f"not sent: call {row.no} of the same tool happened with other arguments and was not asked for again"

    # -- executing

    def _intent(self, asked: _Asked, row: CallRow | None) -> CallRow:
        common: dict[str, Any] = {
            "status": "started",
            "fence": self.guard.fence,
            "started_at": to_us(now()),
            "finished_at": None,
            "ended": None,
            "asked": asked.asked,
            "not_done": False,
            "reason": quarantine.kept_reason(row),
            "error": None,
            "result": None,
            "result_refs": b"",
        }
        tool = asked.tool
        # The whole policy each time: it is the one that this execution follows.
        common |= {"effect": tool.effect, "policy": tool.encoded_policy, "op_key": asked.request.op_key}
        if row is not None:
            return replace(row, attempts=row.attempts + 1, **common)
        return CallRow(
            line=self.line,
            step=self.step,
            scope=asked.request.scope,
            ident=asked.request.ident,
            tool=tool.name,
            call_id=asked.request.call_id,
            idempotency_key=new_id(),
            base_seq=self.base.head.seq if self.base else 0,
            args=asked.packed.data,
            args_refs=asked.packed.refs,
            **common,
        )

    def _execute(self, asked: _Asked, row: CallRow | None, validate: Validate | None) -> Script[Any]:
        tool = asked.tool
        counted = False
        try:
            with self.lock:
                self.executing += 1
                counted = True
            while True:
                yield from self._begin(asked, row)
                row = self.journal.rows[asked.no or 0]
                began = time.perf_counter()
                try:
                    value, row = yield from self._attempt(asked, row, validate)
                except BaseException as error:
                    self.left_open(row.no, error)
                finally:
                    self.counters.last_call_ms = (time.perf_counter() - began) * 1e3
                if row.status == "succeeded":
                    break
                self.seen = max(self.seen, row.ended or 0)
                begun = asked.feed is not None and asked.feed.given  # the consumer must not see the beginning twice
                if begun or asked.failures >= tool.retry.attempts or not isinstance(value, tool.retry.on):
                    raise failed_error(row) from value
                self.counters.retries += 1
                yield Sleep(tool.retry.wait(asked.failures))
                self.check()
        finally:
            if counted:
                self.one_less()
        if row.result is None:
            raise lost_error(self.task, row)
        if tool.policy.model:
            self.journal.scope = row.no
        self.check()  # a sibling may have ended the run; this call went on to its end first
        return value

    def _begin(self, asked: _Asked, row: CallRow | None) -> Script[None]:
        """Write the intent. If this comes to nothing, whether it landed or not, nothing was run: the journal is to say so, as
        soon as it can, and a resume need not ask."""
        intent = CallWrite(self._intent(asked, row), "began")
        try:
            yield Io(lambda: self._claimed(asked, intent, () if row is not None else asked.packed.new))
        except (RunEnded, CallInProgress):
            raise
        except BaseException as error:
            self.unsure.append(intent.row)
            # It may be claimed for us already, under a number that did not come back.
            asked.no = next((r.no for r in self._known() if r.idempotency_key == intent.row.idempotency_key), asked.no)
            if not isinstance(error, Exception):
                yield Io(self.flush_quietly, must=True)
            raise
        self.counters.calls += 1
        self.counters.last_call = asked.tool.name

    def _attempt(self, asked: _Asked, row: CallRow, validate: Validate | None) -> Script[tuple[Any, CallRow]]:
        """Execute once and record. Returns the value with the row, or the exception with the row of a failed attempt."""
        try:
            if asked.tool.effect == "transactional":
                return (yield from self._transact(asked, row))
            value = yield from self._run(asked, row)
            if validate is not None:
                self._validated(value, validate)
        except _Failed as failed:
            error = failed.error
        else:
            return value, (yield Io(lambda: self._succeeded(asked, row, value), must=True))
        asked.failures += 1
        row = yield from self._after_error(asked.tool, row, error)
        if row.status != "succeeded" or row.result is None:
            return error, row
        return (yield Io(lambda: self._recorded(row))), row

    def _claimed(self, asked: _Asked, intent: CallWrite, objects: Sequence[Any]) -> None:
        sync = asked.tool.effect != "read"
        if sync and self.cp.store.multi_host:
            self._still_ours()  # who is late by its own clock leaves no intent of a call that it may not make
        at("intent.before")
        try:
            done = self.commit(self._calls(intent, objects=objects, sync=sync), claim=asked.request)
        except Conflict as error:
            # What the row is now is what the next request for it shall find: an earlier try may have landed unseen.
            for there in self.cp.store.calls(self.task, nos=[intent.row.no], bodies=False)[0]:
                self.journal.put(there)
            raise CallInProgress(
                f"call {intent.row.no} ({intent.row.tool}) is being executed or was settled by somebody else",
                error.why,
                "Resume the task again.",
            ) from error
        asked.no = done.calls[0].no
        at("intent.after")
        if sync:
            self._still_ours()  # not, if it was stopped between the intent and here, and taken over meanwhile: start nothing

    def _still_ours(self) -> None:
        """End the run unless its lease is surely still its own."""
        if not self.cp.store.holds(self.task, self.guard):
            self.lose()

    def _run(self, asked: _Asked, row: CallRow) -> Script[Any]:
        args, kwargs = asked.tool.invocation(
            asked.arguments, {"idempotency_key": row.idempotency_key, "fence": self.guard.fence}
        )
        here = self._here(row)
        at("effect.before")
        try:
            if asked.feed is not None:
                value = yield from asked.feed.draw(asked.tool, args, kwargs, here)
            else:
                value = yield Exec(asked.tool.fn, args, kwargs, here, asked.tool.timeout)
        except RunEnded:
            raise
        except Exception as error:
            raise _Failed(error) from error
        if here.paused is not None:  # the tool swallowed its pause
            raise here.paused
        if inspect.iscoroutine(value):
            # Nothing of it has run. Recording it as a success would be a lie.
            value.close()
            raise _Failed(
                UsageError(
                    f"tool {asked.tool.name!r} returned a coroutine",
                    "it is a plain def around something async",
                    "Make it async def.",
                    tool=asked.tool,
                )
            )
        if asked.tool.policy.model and is_stream(value):
            raise _Failed(
                UsageError(f"model {asked.tool.name!r} returned a stream", "", "Use run.stream, or drop stream=True.")
            )
        at("effect.after")
        return value

    @staticmethod
    def _validated(value: Any, validate: Validate) -> None:
        try:
            validate(value)
        except Exception as error:
            raise _Failed(error) from error

    def _succeeded(self, asked: _Asked, row: CallRow, value: Any) -> CallRow:
        """Record a result. If the store cannot take it now, it is kept and written before anything else."""
        after, objects = self._result(asked, row, value)
        write = self._calls(
            CallWrite(after, "ended"), objects=objects, sync=asked.tool.effect != "read" or asked.tool.policy.model
        )
        at("result.before")
        try:
            recorded = self.commit(write).calls[0]
            at("result.after")
            return recorded
        except (StoreFull, Unavailable):
            self.unwritten.append((write, after))
            raise

    def _result(self, asked: _Asked, row: CallRow, value: Any) -> tuple[CallRow, Sequence[Any]]:
        after = replace(row, status="succeeded", finished_at=to_us(now()), error=None, reason="")
        try:
            packed = states.pack_values({"result": value}, self.cp.registry, None, "", flat=not self.cp.store.chunked)
        except RefusedType as error:
            return replace(after, error=error_record(error)), ()
        if asked.tool.policy.model:
            after = replace(after, model=self._model_facts(asked, value))
        return replace(after, result=packed.data, result_refs=packed.refs), packed.new

    def _model_facts(self, asked: _Asked, reply: Any) -> bytes:
        facts: dict[str, Any] = {}
        for name in ("model", "temperature", "seed"):
            value = get(reply, name)
            value = asked.arguments.get(name) if value is None else value
            if isinstance(value, str | int | float):
                facts[name] = value
        usage = usage_of(reply)
        if usage != (0, 0):
            facts["usage"] = {"input": usage[0], "output": usage[1]}
            with self.lock:
                self.counters.tokens_in += usage[0]
                self.counters.tokens_out += usage[1]
        return values.encode(facts, self.cp.registry)

    def _transact(self, asked: _Asked, row: CallRow) -> Script[tuple[Any, CallRow]]:
        args_kwargs = asked.tool.invocation
        raised: list[Exception] = []
        value: list[Any] = []

        def body(connection: Any) -> Commit:
            args, kwargs = args_kwargs(
                asked.arguments,
                {"idempotency_key": row.idempotency_key, "fence": self.guard.fence, "connection": connection},
            )
            try:
                value[:] = [Exec(asked.tool.fn, args, kwargs, self._here(row)).run()]
            except Exception as error:
                raised.append(error)
                raise
            after, objects = self._result(asked, row, value[0])
            return self._calls(CallWrite(after, "ended"), objects=objects)

        try:
            done = yield Io(lambda: self._noted(self.cp.store.transact(self.task, self.guard, row, body)), must=True)
        except Exception as error:
            if raised:  # the tool's own, whatever it is: all was rolled back
                raise _Failed(raised[0]) from raised[0]
            if isinstance(error, LeaseLost):
                self.end(error)
            if isinstance(error, Conflict):
                # An earlier try landed after all, and its answer was lost.
                there = self.cp.store.calls(self.task, nos=[row.no])[0]
                if there and there[0].status == "succeeded" and there[0].attempts == row.attempts:
                    self.journal.put(there[0])
                    return (yield Io(lambda: self._recorded(there[0]))), there[0]
            if not error_details(error).get("unknown"):
                raise
            # Not the transaction that it began in: part of the effect may stand outside of it.
            doubt = replace(row, status="in_doubt", reason="the transaction was ended while the tool ran")
            done = yield Io(lambda: self.commit(self._calls(CallWrite(doubt, "ended"))))
            self.end(in_doubt_error(self.task, done.calls[0]), error)
        return value[0], done.calls[0]


def error_details(error: Exception) -> dict[str, Any]:
    return error.details if isinstance(error, SafepointError) else {}


class _Failed(Exception):
    """A tool, or the check of its reply, raised ``error``."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error
