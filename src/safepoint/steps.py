"""Named steps: work whose product is kept, and made anew only if it, or what it was made from, has changed or is lost.

What becomes of a step is decided in ``rules.steps``. Here it is run, its product is put beside the state, and what its calls
recorded is served again where it runs a second time.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safepoint.calling import Flow
from safepoint.codec import values
from safepoint.codec.states import Control
from safepoint.errors import CallFailed, Damaged, RunEnded, SafepointError, UsageError
from safepoint.model import a_type, check_id
from safepoint.rows import CallRow, replace
from safepoint.rules import steps
from safepoint.rules.steps import Action, Book, Decision, Made
from safepoint.script import Exec, Io, Script
from safepoint.tools import Current, Tool, current, is_async

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer
    from safepoint.model import Checkpoint, State

log = logging.getLogger("safepoint")

SkipIf = bool | Callable[[], Any] | None

_UNCHANGING = (type(None), bool, int, float, str, bytes)


class NamedSteps:
    """Part of a run."""

    cp: Checkpointer
    task_id: str
    _flow: Flow
    _state: State
    _control: Control
    _in_agent: bool
    _asked_pauses: dict[str, int]
    _named: str | None
    _code: dict[str, Any] | None = None
    """What each name stands for in this run."""

    if TYPE_CHECKING:

        def _check(self) -> None: ...

        def _end_step(
            self, *, kind: str, label: str | None, save: bool, status: str | None = None
        ) -> Script[Checkpoint | None]: ...

    # -- what is there

    @property
    def products(self) -> dict[str, str]:
        """How each named step of the task stands: ``made``, ``failed`` (and optional), ``skipped`` (by its rule), ``lost`` (its
        product cannot be read), or ``fallen`` (out of date: what it was made from has changed or is lost)."""
        return self._book().standings()

    def product(self, name: str) -> Any:
        """What the step of this name returned; None if it failed, was skipped, or is optional and lost. Each time a copy.

        Raises:
            UsageError: there is no such step, or it has to be run again first. Damaged: its product cannot be read.
        """
        book = self._book()
        if check_id(name, "a step's name") not in book.made:
            raise UsageError(
                f"task {self.task_id!r} has no product {name!r}", "no step of this name was run", "Call run.step first."
            )
        if not book.sound(name):
            raise UsageError(
                f"the product {name!r} of task {self.task_id!r} is out of date",
                "what it was made from has changed or is lost",
                f"Call run.step({name!r}, …) first, which makes it anew.",
            )
        if name in book.lost:
            if book.made[name].optional:
                return None
            raise self._lost(name)
        return self._copy(name)

    def _lost(self, name: str) -> Damaged:
        return Damaged(
            f"the product {name!r} of task {self.task_id!r} is lost",
            "what was stored of it cannot be read",
            f"Call run.step({name!r}, …) first, which makes it anew.",
            task=self.task_id,
            product=name,
        )

    def _copy(self, name: str) -> Any:
        """A product to be given out: the one that is kept must not change with it."""
        kept = self._control.products.get(name)
        if type(kept) in _UNCHANGING:
            return kept
        return values.decode(values.encode(kept, self.cp.registry), self.cp.registry)

    def _book(self) -> Book:
        return book_of(self._control)

    # -- running one

    def _step_script(
        self,
        name: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        needs: Iterable[str],
        pure: bool,
        optional: bool,
        skip_if: SkipIf,
    ) -> Script[Any]:
        self._check()
        names = self._wanted(name, fn, needs, pure, optional, skip_if)
        while isinstance(fn, functools.partial):  # what it binds counts as arguments
            bound: functools.partial[Any] = fn
            fn, args, kwargs = bound.func, (*bound.args, *args), {**bound.keywords, **kwargs}
        fingerprint = self._fingerprint(name, args, kwargs)
        book = self._book()
        if circle := book.circle(name, names):
            raise UsageError(
                f"step {name!r} cannot need {circle[1]!r}", f"{' needs '.join(map(repr, circle))}", "Break the circle."
            )
        skip = bool(skip_if()) if callable(skip_if) else bool(skip_if)
        decision = book.decide(name, fingerprint, names, optional=optional, skip=skip)
        log.info("step %r of %s: %s, %s", name, self.task_id, decision.action, decision.why)
        match decision.action:
            case Action.REUSE:
                saved = self._state._base.control.made if self._state._base is not None else {}
                if not self._in_agent and saved.get(name) is not self._control.made[name]:
                    yield from self._end_step(kind="step", label=name, save=True)  # the save that was to keep it failed
                return self._copy(name)
            case Action.SKIP:
                if name not in book.made or book.made[name].status != steps.SKIPPED:
                    blank = Made(fingerprint, {}, 0, steps.digest_of(b"skipped"), steps.SKIPPED, pure, optional)
                    self._keep(name, blank, None)
                return None
            case Action.RUN:
                made, value = yield from self._make(name, fn, args, kwargs, book, decision, fingerprint, names, pure, optional)
                if not self._in_agent:
                    yield from self._end_step(kind="step", label=name, save=True)
                if made.status == steps.FAILED:
                    log.warning("optional step %r of %s failed: %s", name, self.task_id, made.error)
                return value
        raise self._hindered(name, decision)

    def _wanted(self, name: str, fn: Any, needs: Iterable[str], pure: bool, optional: bool, skip_if: SkipIf) -> tuple[str, ...]:
        """Look at what was asked for; returns the needs, each once."""
        check_id(name, "a step's name")
        if self._named is not None:
            raise UsageError(
                f"run.step({name!r}) was called while step {self._named!r} is under way",
                "a product is made from finished ones",
                "Call one after the other, and name what a step needs: needs=[…].",
            )
        if current.get() is None:
            raise UsageError(
                f"run.step({name!r}) came from outside of the run's own code",
                "the run has not been entered, or this is another thread",
                "Use `with cp.resume(…) as run`, and call it there.",
            )
        if not callable(fn):
            raise UsageError(f"run.step({name!r}) was given {a_type(fn)}", "it is to be called", "Pass a function.")
        if isinstance(needs, str):
            raise UsageError(f"needs of step {name!r} is text", "a list of names is expected", f"Write needs=[{needs!r}].")
        for flag, value in (("pure", pure), ("optional", optional)):
            if type(value) is not bool:
                raise UsageError(f"run.step({flag}=) must be a bool", f"it is {a_type(value)}", "Pass True or False.")
        if is_async(skip_if):
            raise UsageError(f"skip_if of step {name!r} is async", "it is asked in place", "Make it a plain function.")
        code = code_of(fn)
        self._code = {} if self._code is None else self._code
        if code is not None and self._code.setdefault(name, code) is not code:
            raise UsageError(
                f"step {name!r} was another function before", "a name stands for one piece of work", "Give each its own name."
            )
        return tuple(dict.fromkeys(check_id(need, "the name of a needed step") for need in needs))

    def _fingerprint(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        # Types and order as they are: a needless run is safe, and a function may tell 1 from 1.0.
        given = [list(args), sorted(kwargs.items())]
        data = values.encode(given, self.cp.registry, path=f"arguments of step {name!r}")
        return steps.digest_of(values.encode(name, self.cp.registry) + data)

    def _hindered(self, name: str, decision: Decision) -> SafepointError:
        need = decision.need
        if decision.action is Action.UNKNOWN:
            return UsageError(
                f"step {name!r} needs {need!r}, and there is no such step", "none of this name was run", "Run it first."
            )
        if need in self._book().lost:
            return self._lost(need)
        return UsageError(f"step {name!r} cannot run yet", decision.why, f"Call run.step({need!r}, …) first, as before.")

    def _make(
        self,
        name: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        book: Book,
        decision: Decision,
        fingerprint: bytes,
        needs: tuple[str, ...],
        pure: bool,
        optional: bool,
    ) -> Script[tuple[Made, Any]]:
        """Run it, and keep what comes of it."""
        flow = self._flow
        before, scope, earlier = dict(flow.journal.delivered), flow.journal.scope, flow.journal.earlier
        pauses = dict(self._asked_pauses)
        parks = flow.parks_below, flow.parks_why
        self._named = name
        lent: dict[int, CallRow] = {}
        error = ""
        try:
            if decision.lost:
                lent = yield Io(lambda: self._lend(name, book.made[name]))
            value = yield from self._executed(name, fn, args, kwargs)
            code = values.encode(value, self.cp.registry, path=f"product of step {name!r}")
        except RunEnded:
            raise
        except BaseException as raised:
            own = isinstance(raised, CallFailed) or not isinstance(raised, SafepointError)
            if flow.ended is not None or not (optional and own and isinstance(raised, Exception)):
                self._give_back(before, scope)
                self._asked_pauses = pauses
                raise
            value, code, error = None, b"failed", type(raised).__name__
        finally:
            self._named = None
            flow.parks_below, flow.parks_why = parks
            flow.journal.earlier = earlier
            self._take_back(lent)
        asked = [no for no, told in flow.journal.delivered.items() if told and not before.get(no)]
        writes = tuple(sorted(no for no in asked if flow.journal.rows[no].effect != "read"))
        made = Made(
            fingerprint,
            book.versions(needs),
            0 if pure else book.next_number(),
            steps.digest_of(code),
            steps.FAILED if error else steps.MADE,
            pure,
            optional,
            tuple(sorted(set(asked) - set(writes))),
            writes,
            error,
        )
        self._keep(name, made, None if error else values.decode(code, self.cp.registry))
        return made, value

    def _keep(self, name: str, made: Made, value: Any) -> None:
        self._control.made[name] = made.encode()
        self._control.products[name] = value

    def _executed(self, name: str, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Script[Any]:
        if isinstance(fn, Tool):
            return (yield from self._flow.call(fn, fn.arguments(args, kwargs), None, None))
        here = Current(self)  # type: ignore[arg-type]  # a run is made of this
        self._fits(name, is_async(fn))
        value = yield Exec(fn, args, dict(kwargs), here)
        if inspect.iscoroutine(value):
            try:
                self._fits(name, True)
            except UsageError:
                value.close()
                raise
            value = yield Exec(_awaited, (value,), {}, here)
        self._flow.check()
        return value

    def _fits(self, name: str, awaits: bool) -> None:
        """Refuse an async function where it cannot be awaited."""

    # -- calls of a step that runs a second time

    def _lend(self, name: str, made: Made) -> dict[int, CallRow]:
        """What the calls of a lost product's making recorded, so that they are served and not made again. If the record of a
        write is gone, no write that is not on record is made on its own."""
        flow = self._flow
        rows, _ = self.cp.store.calls(self.task_id, nos=[*made.reads, *made.writes], bodies=False)
        lent: dict[int, CallRow] = {}
        for row in rows:
            if row.line == flow.line and row.no not in flow.journal.rows and not row.superseded:
                row.check(self.task_id, f"call {row.no}")
                if row.status in ("succeeded", "failed"):
                    lent[row.no] = row
        with flow.lock:
            # As of this step: one that is made again, such as a read whose result is damaged too, is then written as its own.
            flow.journal.rows.update({no: replace(row, step=flow.step) for no, row in lent.items()})
            flow.journal.earlier |= lent.keys()  # a write among them that is not asked for stands in the way of another one
        if not set(made.writes) <= flow.journal.rows.keys():
            flow.parks_below, flow.parks_why = flow.step + 1, f"the record of what {name!r} did when it was made is gone"
        return lent

    def _take_back(self, lent: Mapping[int, CallRow]) -> None:
        journal = self._flow.journal
        with self._flow.lock:
            for no, row in lent.items():
                if journal.rows[no].version != row.version:
                    continue  # it was made again, and is this step's
                if no in journal.delivered:
                    journal.borrowed[no] = row  # becomes this step's with its save
                else:
                    del journal.rows[no]

    def _give_back(self, before: Mapping[int, bool], scope: int) -> None:
        """The step came to nothing. If the program tries it once more, its calls are served from the record."""
        journal = self._flow.journal
        with self._flow.lock:
            for no in [no for no, told in journal.delivered.items() if told and not before.get(no)]:
                del journal.delivered[no]
            journal.scope = scope


def book_of(control: Control) -> Book:
    """The records of a checkpoint. Those that make no sense stand for steps that were not made."""
    decoded = {name: Made.decode(parts) for name, parts in control.made.items()}
    made = {name: m for name, m in decoded.items() if m is not None}
    return Book(made, made.keys() & set(control.lost))


def code_of(fn: Any) -> Any:
    """What makes two functions the same although they are made anew each time, as closures are; None if nothing does."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if isinstance(fn, Tool) else getattr(getattr(fn, "__func__", fn), "__code__", None)


async def _awaited(value: Any) -> Any:
    return await value
