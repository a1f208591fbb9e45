"""Declaring what a tool does to the world: ``@tool`` and ``@model``.

A decorated function stays callable: inside a step a direct call is ``run.call``, outside of any run it is the plain
function, which is also at hand as ``tool.fn``. What the decorator adds is a policy, and the policy is stored with every
call, so that ``plan`` and the command line can say what will happen without the application's code.
"""

from __future__ import annotations

import difflib
import functools
import gc
import inspect
import json
import math
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast, overload

from safepoint.errors import UsageError
from safepoint.model import Call, Done, Effect, NotDone, Retry, Unknown, check_id, exception_types
from safepoint.rules.policy import REPLAN, Policy, Replan

P = ParamSpec("P")
R = TypeVar("R")

Verdict = Done | NotDone | Unknown
Verifier = Callable[[Call], Any]

EFFECTS: tuple[str, ...] = ("read", "idempotent", "transactional", "write")
INJECTED = frozenset({"idempotency_key", "fence", "connection"})
"""Keyword-only parameters of these names are filled in by the run; they are no part of a call's arguments."""


def is_async(fn: Any) -> bool:
    """Whether calling ``fn`` gives something to await; objects with an async ``__call__`` included."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


class Caller:
    """What a tool needs of a run, so that this module stays below it."""

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@dataclass(slots=True)
class Current:
    """Where we are: the run whose step is being executed, and the call inside of which we are, if any."""

    run: Caller
    call: Any = None
    paused: BaseException | None = None
    """The pause that the tool asked for; sticks even if the tool swallows it."""
    hook: bool = False
    """In a hook between two steps, where no call belongs to any."""


current: ContextVar[Current | None] = ContextVar("safepoint_current", default=None)
live_runs: weakref.WeakSet[Caller] = weakref.WeakSet()


class _Registry:
    """All live tools by their stored names, held weakly. Two of one name are a fault that shows when the name is used."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # declaring may make the collector run, and that anybody's __del__
        self.named: dict[str, tuple[weakref.ref[Tool[Any, Any]], ...]] = {}
        self.sweep_at = 256

    def add(self, tool: Tool[Any, Any]) -> None:
        with self.lock:
            # The newest last; those that are dead, or were the same tool, give way.
            others = (r for r in self.named.get(tool.name, ()) if (t := r()) is not None and not _same_tool(t, tool))
            self.named[tool.name] = (*others, weakref.ref(tool))
            if len(self.named) > self.sweep_at:  # names made up for each request must not pile up
                self.named = {n: refs for n, refs in self.named.items() if any(r() is not None for r in refs)}
                self.sweep_at = 2 * len(self.named) + 256

    def only(self, name: str) -> Tool[Any, Any] | None:
        """The one live tool of this name. Two: UsageError."""
        found = self._live(name)
        if len(found) > 1:
            del found
            gc.collect()  # the older ones may be unreachable, and not collected yet
            found = self._live(name)
        if len(found) > 1:
            raise UsageError(
                f"{len(found)} different tools are named {name!r}",
                f"they are made at {', '.join(sorted({_place(t.fn) for t in found}))}, and a call is stored with the name alone: "
                "after a crash it could be taken for the other tool's",
                "Give each a name of its own, the same in every process: @tool(name=…) or @model(name=…).",
                tool=name,
            )
        return found[0] if found else None

    def _live(self, name: str) -> list[Tool[Any, Any]]:
        return [t for r in self.named.get(name, ()) if (t := r()) is not None]


def _same_tool(a: Tool[Any, Any], b: Tool[Any, Any]) -> bool:
    """Whether one function was declared twice, so that the newer declaration stands for both."""
    f, g = a.fn, b.fn
    return f is g or _reloaded(f, g) or (_alike(f, g) and _alike(a.verify, b.verify) and _alike(a.key, b.key))


def _reloaded(f: Any, g: Any) -> bool:
    """The same lines of a module, or of a notebook's cell, that were executed again."""
    x, y = getattr(f, "__code__", None), getattr(g, "__code__", None)
    # One code object twice means the siblings of a factory, and so does a function within one.
    if x is None or y is None or x is y or "<" in x.co_qualname + x.co_filename:
        return False
    return (x.co_filename, x.co_firstlineno, x.co_qualname) == (y.co_filename, y.co_firstlineno, y.co_qualname)


def _alike(f: Any, g: Any) -> bool:
    """One function, or two that a factory made of the very same parts: they do the same."""
    if f is g:
        return True
    if isinstance(f, MethodType) and isinstance(g, MethodType):
        return f.__func__ is g.__func__ and f.__self__ is g.__self__
    if not isinstance(f, FunctionType) or not isinstance(g, FunctionType):
        return False
    try:
        parts, others = _parts(f), _parts(g)
    except ValueError:  # a variable that has no value yet
        return False
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


def _parts(fn: FunctionType) -> list[object]:
    named = [part for pair in sorted((fn.__kwdefaults__ or {}).items()) for part in pair[1:]]
    return [fn.__code__, fn.__globals__, *(c.cell_contents for c in fn.__closure__ or ()), *(fn.__defaults__ or ()), *named]


def _place(fn: Any) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else f"an object of {type(fn).__qualname__}"


_registry = _Registry()


def tool_named(name: str) -> Tool[Any, Any] | None:
    """The tool of this stored name, if its module has been imported in this process.

    Raises:
        UsageError: several live tools have it.
    """
    return _registry.only(name)


def sole(tool: Tool[Any, Any]) -> None:
    """Raise UsageError if another live tool has this one's name: neither may be journaled, as the record would not say which."""
    if len(_registry.named.get(tool.name, ())) > 1:
        _registry.only(tool.name)


class Tool(Generic[P, R]):
    """A function together with what safepoint must know of its effect. Made by ``@tool`` and ``@model``."""

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        effect: Effect,
        name: str | None,
        verify: Verifier | None,
        policy: Policy,
        failed_on: tuple[type[BaseException], ...],
        retry: Retry,
        timeout: float | None,
        key: Callable[..., Any] | None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.effect = effect
        self.name = f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__qualname__)}" if name is None else name
        self.verify = verify
        self.policy = policy
        self.encoded_policy = policy.encode()
        self.failed_on = failed_on
        self.retry = retry
        self.timeout = timeout
        self.key = key
        self.is_async = is_async(fn)
        self.streams = inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
        try:
            self.signature = inspect.signature(fn)
        except (TypeError, ValueError):
            self._refuse("its parameters cannot be read, as of many functions written in C", "Wrap it in a def of your own.")
        self.injects = frozenset(
            p.name for p in self.signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name in INJECTED
        )
        self._bindable = self.signature.replace(
            parameters=[p for p in self.signature.parameters.values() if p.name not in self.injects]
        )
        self._kinds = {p.name: p.kind for p in self._bindable.parameters.values()}
        self._check()
        _registry.add(self)

    def _refuse(self, why: str, remedy: str) -> NoReturn:
        raise UsageError(f"tool {self.name!r} cannot be declared like this", why, remedy)

    def _check(self) -> None:
        refuse = self._refuse
        check_id(self.name, "name of a tool")
        first = next(iter(self.signature.parameters), None)
        if first in ("self", "cls"):
            refuse(
                f"its first parameter is {first}, as of a method, and a decorated method is not bound to its object",
                "Decorate a function, or declare the bound method of one object: tool(obj.method, name=…).",
            )
        if self.effect not in EFFECTS:
            refuse(f"effect {self.effect!r} is not one of {', '.join(EFFECTS)}", "Name one of them.")
        if self.streams and not self.policy.model:
            refuse("it is a generator; a call has one result", "Return the whole value.")
        if self.policy.replan not in REPLAN:
            refuse(f"replan={self.policy.replan!r} is not one of {', '.join(REPLAN)}", "Name one of them.")
        for what, seconds in (
            ("timeout", self.timeout),
            ("key_ttl", self.policy.key_ttl),
            ("settle_after", self.policy.settle),
        ):
            if seconds is None and what != "settle_after":
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                shown = repr(seconds) if isinstance(seconds, int | float) else f"a {type(seconds).__name__}"
                refuse(f"{what}={shown} is no number of seconds", "Pass an int or a float of 0 or more.")
        if self.policy.key_ttl is not None and self.effect != "idempotent":
            refuse(f"key_ttl= belongs to effect='idempotent', this is {self.effect!r}", "Drop it.")
        if self.policy.final and self.verify is None:
            refuse("verify_is_final=True says something of a verifier, and there is none", "Give verify=.")
        if self.timeout is not None and not self.is_async:
            refuse(
                "timeout= is for async tools: a sync one cannot be stopped", "Make it async, or use the client's own timeout."
            )
        if self.effect == "transactional" and self.is_async:
            refuse(
                "a transactional tool runs inside the journal's transaction and must be sync and short", "Make it a plain def."
            )
        if self.effect == "transactional" and "connection" not in self.injects:
            refuse(
                "a transactional tool writes its effect through the journal's own connection, and this one does not take it",
                "Take it as a keyword-only parameter: def f(…, *, connection).",
            )
        if "connection" in self.injects and self.effect != "transactional":
            refuse("only transactional tools get a connection", "Declare effect='transactional'.")
        if self.verify is not None and self.effect != "write":
            refuse(f"a verifier belongs to effect='write', this is {self.effect!r}", "Drop verify=, or declare a write.")
        if self.verify is not None and not _takes_one(self.verify):
            refuse("verify= is to be called with the Call alone, and cannot be", "Give a function of one parameter.")
        if self.key is not None and not callable(self.key):
            refuse(f"key= is a {type(self.key).__name__}", "Give a function of the tool's own parameters.")
        if self.policy.dedups and not self.injects & {"idempotency_key", "fence"}:
            refuse(
                "receiver_dedups=True needs the receiver to get something to compare",
                "Take idempotency_key or fence as a keyword-only parameter and send it along.",
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        here = current.get()
        if here is None:
            if self.effect == "write" and live_runs:
                raise UsageError(
                    f"write tool {self.name!r} was called outside of its run's context",
                    "a live run is held by this process, and an effect that bypasses the journal may happen twice",
                    "Call it with run.call(…, call_id=…) from your own thread, or call tool.fn if it is not part of the run.",
                )
            return self.fn(*args, **kwargs)
        if here.call is not None:  # a tool that uses another tool: it is part of the outer call
            return self.fn(*args, **kwargs)
        return cast(R, here.run.call(self, *args, **kwargs))

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Bound:
        """The call with its arguments, to be given to ``run.call_many``."""
        return Bound(self, self.arguments(args, kwargs))

    def arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Parameter name -> value, defaults filled in, injected ones left out."""
        for name in self.injects & kwargs.keys():
            raise UsageError(f"tool {self.name!r} was given {name}=", "the run fills it in", "Leave it out.")
        try:
            bound = self._bindable.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(
                f"tool {self.name!r} cannot be called like this", self._misfit(kwargs, error), "Nothing was run."
            ) from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def _misfit(self, kwargs: Mapping[str, Any], error: TypeError) -> str:
        # By our own words: bind() complains of what is missing before it names what it does not know.
        takes = f"it takes {', '.join(self._kinds)}" if self._kinds else "it takes no arguments"
        unknown = [name for name in kwargs if name not in self._kinds]
        if unknown and inspect.Parameter.VAR_KEYWORD not in self._kinds.values():
            return f"it has no parameter {', '.join(map(repr, unknown))}; {takes}"
        for name in INJECTED & self._kinds.keys():
            if f"'{name}'" in str(error):
                return f"{name} is filled in by the run only if it is keyword-only: def f(…, *, {name})"
        return f"{error}; {takes}"

    def from_json(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Arguments as a model gives them: a mapping, or its JSON text."""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise UsageError(f"the arguments for {self.name!r} are not JSON", str(error), "Nothing was run.") from None
        if not isinstance(arguments, Mapping):
            raise UsageError(
                f"the arguments for {self.name!r} are a {type(arguments).__name__}", "a mapping is needed", "Nothing was run."
            )
        return self.arguments((), dict(arguments))

    def invocation(self, arguments: Mapping[str, Any], injected: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """How to call ``fn`` with these arguments, undoing ``arguments``."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, kind in self._kinds.items():
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args.extend(arguments[name])
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs.update(arguments[name])
            elif kind is inspect.Parameter.KEYWORD_ONLY:
                kwargs[name] = arguments[name]
            else:
                args.append(arguments[name])
        kwargs.update({k: v for k, v in injected.items() if k in self.injects})
        return args, kwargs

    def operation(self, arguments: Mapping[str, Any]) -> Any:
        """The business operation that ``key=`` says the call is, or None."""
        if self.key is None:
            return None
        args, kwargs = self.invocation(arguments, {})
        return self.key(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Tool {self.name} effect={self.effect}>"


@dataclass(frozen=True, slots=True, repr=False)
class Bound:
    """A tool with arguments; ``call_id`` may be added for calls that a model named."""

    tool: Tool[Any, Any]
    arguments: dict[str, Any]
    call_id: str | None = None

    def with_id(self, call_id: str) -> Bound:
        return Bound(self.tool, self.arguments, call_id)

    def __repr__(self) -> str:
        return f"<Bound {self.tool.name}>"


@overload
def tool(fn: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    effect: Effect = "write",
    name: str | None = None,
    verify: Verifier | None = None,
    verify_is_final: bool = False,
    receiver_dedups: bool = False,
    settle_after: float = 2.0,
    key: Callable[..., Any] | None = None,
    key_ttl: float | None = None,
    replan: Replan = "park",
    failed_on: type[BaseException] | Iterable[type[BaseException]] = (),
    retry: Retry | None = None,
    timeout: float | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(fn: Any = None, /, **options: Any) -> Any:
    """Declare a tool.

    Args:
        effect: ``write`` (the default: unknown outcomes are never repeated blindly), ``read`` (may be repeated),
            ``idempotent`` (repeated with the same ``idempotency_key``, if it takes one; without, it is idempotent by
            itself), ``transactional`` (effect and record are one database transaction; the function takes ``connection``
            as a keyword-only parameter).
        name: Stored name; module and qualified name by default. Give one if the function may move, and to each of several
            that are made by one factory.
        verify: Asked after a crash whether a write happened; takes the ``Call``, answers ``Done(result)``, ``NotDone()``
            or ``Unknown(reason)``. May be async.
        verify_is_final: ``NotDone()`` also means that it cannot happen later any more.
        receiver_dedups: The receiver refuses a known ``idempotency_key`` or a stale ``fence``.
        settle_after: Seconds to wait before the verifier is asked, for effects that were under way.
        key: From the arguments to the business operation, for models that plan the same thing in other words.
        key_ttl: Seconds for which the receiver remembers an ``idempotency_key``.
        replan: What to do with a call of other arguments while a write of this tool that happened is unclaimed.
        failed_on: Exceptions that prove that the effect did not happen: one class, or several.
        retry: How often to try again what has failed.
        timeout: Seconds, async tools only.

    Raises:
        UsageError: a combination that cannot be kept.
    """

    return _decorator("tool", fn, options)


@overload
def model(fn: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def model(
    *, name: str | None = None, retry: Retry | None = None, timeout: float | None = None
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def model(fn: Any = None, /, **options: Any) -> Any:
    """Declare a model call: a ``read`` whose reply is durable before it is returned, so that none is paid for twice.

    The function may return a stream of chunks, or be a generator of them (async ones too), for ``run.stream``.

    Recorded with it, where the reply or the arguments tell: model name, temperature, seed, usage.
    """

    return _decorator("model", fn, options)


_OPTIONS: dict[str, tuple[str, ...]] = {
    "tool": (
        "effect", "name", "verify", "verify_is_final", "receiver_dedups", "settle_after", "key", "key_ttl", "replan", "failed_on",
        "retry", "timeout",
    ),
    "model": ("name", "retry", "timeout"),
}  # fmt: skip


def _decorator(verb: str, fn: Any, options: dict[str, Any]) -> Any:
    """What ``tool`` and ``model`` share; everything that can be found wrong without the function is, at once."""
    known = _OPTIONS[verb]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            why = "a model call is always a read" if verb == "model" and name in _OPTIONS["tool"] else ""
            remedy = f"Did you mean {close[0]}=? " if close else ""
            raise UsageError(f"{verb}() has no option {name!r}", why, f"{remedy}It takes {', '.join(known)}.")
    retry = options.get("retry")
    if retry is not None and not isinstance(retry, Retry):
        raise UsageError(f"{verb}() was given a {type(retry).__name__} as retry=", "", "Pass Retry(attempts=3).")
    if verb == "model":
        options["effect"] = "read"
    if "failed_on" in options:
        options["failed_on"] = exception_types(options["failed_on"], "failed_on")

    def decorate(f: Any) -> Tool[..., Any]:
        if isinstance(f, staticmethod):
            f = f.__func__
        if isinstance(f, Tool):
            raise UsageError(f"{f.name!r} is a tool already", "", f"Declare it once; its function is {verb}'s tool.fn.")
        if isinstance(f, classmethod):
            raise UsageError(
                "a class method cannot be a tool",
                "it is bound to its class only later",
                f"Decorate a function, or write {verb}(TheClass.method) below the class.",
            )
        if not callable(f):
            hint = f" An effect is named as in {verb}(effect={f!r})." if verb == "tool" and isinstance(f, str) else ""
            raise UsageError(
                f"{verb}() was given a {type(f).__name__}, no function",
                "",
                f"Write @{verb} or @{verb}(…) above a function.{hint}",
            )
        return _declare(f, model=verb == "model", **options)

    return decorate if fn is None else decorate(fn)


def _takes_one(fn: Any) -> bool:
    if not callable(fn):
        return False
    try:
        inspect.signature(fn).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C: only the call itself would tell
        pass
    return True


def _declare(
    fn: Callable[..., Any],
    *,
    model: bool,
    effect: Effect = "write",
    name: str | None = None,
    verify: Verifier | None = None,
    verify_is_final: bool = False,
    receiver_dedups: bool = False,
    settle_after: float = 2.0,
    key: Callable[..., Any] | None = None,
    key_ttl: float | None = None,
    replan: Replan = "park",
    failed_on: tuple[type[BaseException], ...] = (),
    retry: Retry | None = None,
    timeout: float | None = None,
) -> Tool[..., Any]:
    retry = retry or Retry()
    policy = Policy(
        verify=verify is not None,
        final=verify_is_final,
        dedups=receiver_dedups,
        settle=settle_after,
        key_ttl=key_ttl,
        replan=replan,
        key=key is not None,
        attempts=retry.attempts,
        model=model,
    )
    return Tool(
        fn,
        effect=effect,
        name=name,
        verify=verify,
        policy=policy,
        failed_on=failed_on,
        retry=retry,
        timeout=timeout,
        key=key,
    )
