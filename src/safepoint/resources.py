"""Outside resources in a state: reported and reopened where they have expired, closed when their task has ended.

The hooks are calls of the run's journal like any other: what was reopened before a crash is not reopened again, and what was
closed is closed once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from safepoint.codec import MAX_DEPTH, Resource, values
from safepoint.codec.classes import inside
from safepoint.codec.kinds import key_text
from safepoint.errors import CallFailed, LeaseHeld, NotFound, RefusedType, RunEnded, SafepointError, UsageError
from safepoint.holding import give_back
from safepoint.model import a_type, check_id
from safepoint.rows import TaskPatch
from safepoint.script import Exec, Io, LoopThread, Script, perform
from safepoint.stores import holder
from safepoint.tools import Tool, tool

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer
    from safepoint.model import State
    from safepoint.restoring import Restoring
    from safepoint.run import Run
    from safepoint.stores.base import Store

log = logging.getLogger("safepoint")

Hook = Callable[..., Any]
Told = tuple[str, str, str]
"""Where a resource stands, of what kind it is, and what became of it."""

_TRIES = 3
_ATOMS = frozenset((type(None), bool, int, float, str, bytes, bytearray, complex))


@dataclass(frozen=True, slots=True)
class _Hooks:
    reopen: Tool[Any, Any] | None = None
    close: Tool[Any, Any] | None = None


_hooks: dict[str, _Hooks] = {}


def resource(kind: str, *, reopen: Hook | None = None, close: Hook | None = None) -> None:
    """Say how resources of a kind are opened again and closed, in this process; the last word on a kind counts.

    Args:
        kind: As in ``Resource(kind, …)``.
        reopen: Takes an expired ``Resource``, returns another one of its kind that takes its place. Called on resume.
        close: Takes a ``Resource`` that the ended task has left open. What it returns is ignored.

    Both may be async, and tools of effect ``read`` or ``idempotent``; a plain function is taken for idempotent: after a crash
    in it, it is called again with the same resource (and the same ``idempotency_key``, if it takes one).

    Raises:
        UsageError: a hook cannot be called with one resource, or is a tool of another effect.
    """
    check_id(kind, "the kind of a resource")
    _hooks[kind] = _Hooks(_hook(kind, "reopen", reopen), _hook(kind, "close", close))


def _hook(kind: str, what: str, fn: Hook | None) -> Tool[Any, Any] | None:
    if fn is None:
        return None
    if not callable(fn):
        raise UsageError(f"resource({what}=) of {kind!r} is {a_type(fn)}", "it is to be called", "Pass a function.")
    made: Tool[Any, Any] = fn if isinstance(fn, Tool) else tool(effect="idempotent", name=f"{what} {kind}")(fn)
    if made.effect not in ("read", "idempotent"):
        raise UsageError(
            f"resource({what}=) of {kind!r} is a tool of effect {made.effect}",
            "after a crash in it, it is called again",
            "Make it idempotent: closing what is closed is no error.",
        )
    made.arguments((Resource(kind, None),), {})  # raises if it does not take just that
    return made


# -- finding them


def find(value: Any, path: str = "agent_state") -> list[tuple[str, Resource]]:
    """Every resource in a value, with a path to it. What is one object at several places is looked into once.

    The value may not be storable: what is in it beyond that is not looked for.
    """
    found: list[tuple[str, Resource]] = []
    _walk(value, path, found, set(), MAX_DEPTH)
    return found


def _walk(value: Any, path: str, found: list[tuple[str, Resource]], seen: set[int], depth: int) -> None:
    if type(value) in _ATOMS:
        return
    if isinstance(value, Resource):
        found.append((path, value))
        return
    if id(value) in seen or depth <= 0:
        return
    seen.add(id(value))
    for step, part in _parts(value):
        if type(part) not in _ATOMS:
            _walk(part, path + step, found, seen, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key_text(key)}]", part
    elif isinstance(value, list | tuple | deque) and not hasattr(value, "_fields"):
        for i, part in enumerate(value):
            yield f"[{i}]", part
    else:
        # Of a class of the application: what it holds, by name, past properties where there is a dict of it.
        # (A class, a module or a function in the state is for the save to refuse.)
        if isinstance(value, type | ModuleType | FunctionType):
            return
        held = inside(value)
        for more in ("__pydantic_extra__", "__pydantic_private__"):
            held |= held.pop(more, None) or {}
        if isinstance(value, tuple):
            held |= zip(getattr(value, "_fields", ()), value, strict=False)
        for name, part in held.items():
            yield f".{name}", part


def _groups(cp: Checkpointer, found: list[tuple[str, Resource]]) -> list[list[tuple[str, Resource]]]:
    """The same resource may stand at several places."""
    groups: dict[bytes, list[tuple[str, Resource]]] = {}
    for path, r in found:
        groups.setdefault(values.encode([r.kind, r.value], cp.registry, path=path), []).append((path, r))
    return list(groups.values())


def _closable(r: Resource) -> bool:
    return r.kind in _hooks and _hooks[r.kind].close is not None


# -- of a run


def restored(run: Restoring) -> Script[None]:
    """A run has come to its state: reopen what has expired, or close what the ended task has left."""
    if run._control.finished:
        if (interrupt := (yield from close_quietly(run))) is not None:
            raise interrupt
        give_up(run._state.agent_state, run._state.step)
        return
    expired = [(path, r) for path, r in find(run._state.agent_state) if r.expired and not r.closed]
    told: list[Told] = []
    for group in _groups(run.cp, expired):
        kind = group[0][1].kind
        hook = _hooks[kind].reopen if kind in _hooks else None
        new, what = (None, "expired") if hook is None else (yield from _reopened(run, hook, group[0][1]))
        for path, r in group:
            told.append((path, kind, what))
            if new is not None:
                r.value, r.expires_at = new.value, new.expires_at
            log.log(
                logging.WARNING if new is None else logging.INFO,
                "resource %s at %s of %s had expired: %s", kind, path, run.task_id, what,
            )  # fmt: skip
    if told:
        run.recovery = run._state.recovery = replace(run.recovery, expired=tuple(told))


def _reopened(run: Restoring, hook: Tool[Any, Any], old: Resource) -> Script[tuple[Resource | None, str]]:
    for _ in range(_TRIES):
        try:
            new = yield from run._flow.call(hook, hook.arguments((replace(old),), {}), None, None)
        except (CallFailed, RefusedType) as error:
            name = error.type if isinstance(error, CallFailed) else type(error).__name__
            return None, f"not reopened: {name.rpartition('.')[2]}"
        if not isinstance(new, Resource) or new.kind != old.kind:
            return None, f"not reopened: its hook returned {a_type(new)}, no resource of its kind"
        if not new.expired:
            return new, "reopened"
        old = new  # what an earlier attempt had reopened, and is on record, has expired meanwhile
    return None, "not reopened: it comes back expired"


def give_up(agent_state: Any, step: int) -> list[Resource]:
    """The task ends with so many steps done: mark what is to be closed. Returns what was marked, for ``take_back``."""
    if not _hooks:
        return []
    marked = [r for _, r in find(agent_state) if not r.closed and _closable(r)]
    for r in marked:
        r.ended = step
    return marked


def take_back(marked: list[Resource]) -> None:
    for r in marked:
        r.ended = None


def close_leftovers(run: Restoring) -> Script[tuple[Told, ...]]:
    """Close what the ended task has left open, each once. A hook that fails is logged, and tried again at the next chance."""
    flow, base = run._flow, run._state._base
    if not _hooks or base is None or not base.control.finished or flow.ended is not None or run._left_at == base.head.seq:
        return ()
    # As it is stored: the live state may have been changed since, and a hook is known by its arguments.
    stored = yield Io(lambda: run.cp.load_latest(run.task_id))
    run._left_at = base.head.seq
    told: list[Told] = []
    # Not those of an earlier turn: they were closed then, or when this one began.
    open_ = [(p, r) for p, r in find(stored.agent_state) if _closable(r) and r.ended in (None, stored.step)]
    for group in _groups(run.cp, open_):
        path, r = group[0]
        hook = _hooks[r.kind].close
        assert hook is not None
        what = "closed"
        try:
            yield from flow.call(hook, hook.arguments((replace(r, ended=None),), {}), None, None)
        except CallFailed as error:
            what = f"not closed: {error.type.rpartition('.')[2]}"
        except RefusedType:
            pass  # what it returned cannot be stored, and nobody wants it
        told += [(path, r.kind, what) for path, r in group]
        log.log(
            logging.INFO if what == "closed" else logging.WARNING,
            "resource %s at %s of %s: %s",
            r.kind,
            path,
            run.task_id,
            what,
        )
    return tuple(told)


def close_quietly(run: Any) -> Script[BaseException | None]:
    """``close_leftovers`` on the way out: nothing that goes wrong takes the place of how the run ended. Returns an interrupt, to
    be raised once the task is let go of."""
    try:
        if getattr(run, "_flow", None) is not None and getattr(run, "_state", None) is not None:
            run.leftovers = (yield from close_leftovers(run)) or run.leftovers
    except BaseException as error:
        log.warning("resources of %s were left open: %s", run.task_id, type(error).__name__)
        return None if isinstance(error, Exception | RunEnded | GeneratorExit) else error
    return None


# -- verbs


class ResourceVerbs:
    """Part of ``Checkpointer``."""

    store: Store

    if TYPE_CHECKING:

        def load_latest(self, task_id: str) -> State | None: ...
        def resume(self, task_id: str | None = None, **options: Any) -> Run: ...
        @staticmethod
        def _no_task(task_id: str) -> NotFound: ...

    def close_leftovers(self, task_id: str) -> tuple[Told, ...]:
        """Close the resources of a finished task that are still open: its process died first, or a hook failed or was not known.

        Returns:
            ``(path, kind, what became of it)`` of each whose kind has a close hook; those closed before are told of as closed.

        Raises:
            NotFound: no such task. UsageError: it has not ended. LeaseHeld: a live run holds it.
        """
        state = self.load_latest(check_id(task_id))
        if state is None:
            raise self._no_task(task_id)
        if not state._base.control.finished:
            raise UsageError(f"task {task_id!r} has not ended", "what it has open is still of use", "Finish or delete it.")
        if not any(_closable(r) for _, r in find(state.agent_state)):
            return ()
        with self.resume(task_id) as run:
            return run.leftovers

    def _close_after(self, task_id: str) -> None:
        """The task was ended by a verb, which stands whatever comes of this."""
        try:
            self.close_leftovers(task_id)
        except SafepointError as error:
            log.warning("resources of %s were left open: %s", task_id, type(error).__name__)

    def _close_before_delete(self, task_id: str) -> None:
        """A task is about to be removed, and its journal with it: what is open in its newest state is closed right now."""
        if not _hooks:
            return
        try:
            lease, state = self.store.lease(task_id), self.load_latest(task_id)
            if state is None or (lease is not None and lease.live):
                return
            if state._base.control.finished:
                self.close_leftovers(task_id)
                return
            if self._left_open(state):
                self._close_held(task_id)
        except LeaseHeld:
            return  # as whoever deletes it is told
        except SafepointError as error:
            log.warning("resources of %s were left open: %s", task_id, type(error).__name__)

    def _left_open(self, state: State | None) -> list[Resource]:
        open_ = _groups(self, find(state.agent_state)) if state is not None else []  # type: ignore[arg-type]
        return [group[0][1] for group in open_ if _closable(group[0][1]) and not group[0][1].closed]

    def _close_held(self, task_id: str) -> None:
        """Close what is open, while no run can begin that would use it."""
        before = self.store.task(task_id)
        grant, loop = self.store.acquire(task_id, holder.describe()), LoopThread()
        try:
            for r in self._left_open(self.load_latest(task_id)):
                hook = _hooks[r.kind].close
                assert hook is not None
                _called(hook, r, task_id, loop)
        finally:
            loop.close()
            # As it was: it may yet turn out that it cannot be deleted.
            give_back(self.store, task_id, grant, None if before is None else TaskPatch(status=before.status))


def _called(hook: Tool[Any, Any], r: Resource, task: str, loop: LoopThread) -> None:
    try:
        # One key for each resource of a task: should the task be deleted twice, the receiver knows it.
        key = f"{task} {hook.name}"
        args, kwargs = hook.invocation(hook.arguments((replace(r),), {}), {"idempotency_key": key, "fence": 0})
        perform(Exec(hook.fn, args, dict(kwargs)), loop)
    except Exception as error:
        log.warning("resource %s of %s was left open: %s", r.kind, task, type(error).__name__)
