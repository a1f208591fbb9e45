"""Declaring what a tool does to the world: ``@tool`` and ``@model``.

A decorated function stays callable: inside a step a direct call is ``run.call``, outside of any run it is the plain
function, which is also at hand as ``tool.fn``. What the decorator adds is a policy, and the policy is stored with every
call, so that ``plan`` and the command line can say what will happen without the application's code.
"""

from __future__ import annotations

import functools
import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from safepoint.errors import UsageError
from safepoint.model import Call, Done, Effect, NotDone, Retry, Unknown, check_id
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


current: ContextVar[Current | None] = ContextVar("safepoint_current", default=None)
live_runs: weakref.WeakSet[Caller] = weakref.WeakSet()

_tools: weakref.WeakValueDictionary[str, Tool[Any, Any]] = weakref.WeakValueDictionary()


def tool_named(name: str) -> Tool[Any, Any] | None:
    """The tool of this stored name, if its module has been imported in this process."""
    return _tools.get(name)


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
        self.name = name or f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
        self.verify = verify
        self.policy = policy
        self.encoded_policy = policy.encode()
        self.failed_on = failed_on
        self.retry = retry
        self.timeout = timeout
        self.key = key
        self.is_async = is_async(fn)
        self.signature = inspect.signature(fn)
        self.injects = frozenset(
            p.name for p in self.signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name in INJECTED
        )
        self._bindable = self.signature.replace(
            parameters=[p for p in self.signature.parameters.values() if p.name not in self.injects]
        )
        self._kinds = {p.name: p.kind for p in self._bindable.parameters.values()}
        self._check()
        _tools[self.name] = self

    def _check(self) -> None:
        def refuse(why: str, remedy: str) -> None:
            raise UsageError(f"tool {self.name!r} cannot be declared like this", why, remedy)

        check_id(self.name, "a tool's name")
        if self.effect not in EFFECTS:
            refuse(f"effect {self.effect!r} is not one of {', '.join(EFFECTS)}", "Name one of them.")
        if inspect.isgeneratorfunction(self.fn) or inspect.isasyncgenfunction(self.fn):
            refuse("it is a generator; a call has one result", "Return the whole value.")
        if self.policy.replan not in REPLAN:
            refuse(f"replan={self.policy.replan!r} is not one of {', '.join(REPLAN)}", "Name one of them.")
        for what, seconds in (("timeout", self.timeout), ("key_ttl", self.policy.key_ttl), ("settle_after", self.policy.settle)):
            if seconds is not None and not seconds >= 0:
                refuse(f"{what}={seconds!r} is no number of seconds", "Pass 0 or more.")
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
        if "connection" in self.injects and self.effect != "transactional":
            refuse("only transactional tools get a connection", "Declare effect='transactional'.")
        if self.verify is not None and self.effect != "write":
            refuse(f"a verifier belongs to effect='write', this is {self.effect!r}", "Drop verify=, or declare a write.")
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
            raise UsageError(f"tool {self.name!r} cannot be called like this", str(error), "Nothing was run.") from None
        bound.apply_defaults()
        return dict(bound.arguments)

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
    failed_on: Iterable[type[BaseException]] = (),
    retry: Retry | None = None,
    timeout: float | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(fn: Any = None, /, **options: Any) -> Any:
    """Declare a tool.

    Args:
        effect: ``write`` (the default: unknown outcomes are never repeated blindly), ``read`` (may be repeated),
            ``idempotent`` (repeated with the same ``idempotency_key``), ``transactional`` (effect and record are one
            database transaction; the function takes ``connection`` as a keyword-only parameter).
        name: Stored name; module and qualified name by default. Give one if the function may move.
        verify: Asked after a crash whether a write happened; takes the ``Call``, answers ``Done(result)``, ``NotDone()``
            or ``Unknown(reason)``. May be async.
        verify_is_final: ``NotDone()`` also means that it cannot happen later any more.
        receiver_dedups: The receiver refuses a known ``idempotency_key`` or a stale ``fence``.
        settle_after: Seconds to wait before the verifier is asked, for effects that were under way.
        key: From the arguments to the business operation, for models that plan the same thing in other words.
        key_ttl: Seconds for which the receiver remembers an ``idempotency_key``.
        replan: What to do with a call of other arguments while a write of this tool that happened is unclaimed.
        failed_on: Exceptions that prove that the effect did not happen.
        retry: How often to try again what has failed.
        timeout: Seconds, async tools only.

    Raises:
        UsageError: a combination that cannot be kept.
    """

    def decorate(f: Callable[..., Any]) -> Tool[..., Any]:
        return _declare(f, model=False, **options)

    return decorate if fn is None else decorate(fn)


@overload
def model(fn: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def model(
    *, name: str | None = None, retry: Retry | None = None, timeout: float | None = None
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def model(fn: Any = None, /, **options: Any) -> Any:
    """Declare a model call: a ``read`` whose reply is durable before it is returned, so that none is paid for twice.

    Recorded with it, where the reply or the arguments tell: model name, temperature, seed, usage.
    """

    def decorate(f: Callable[..., Any]) -> Tool[..., Any]:
        return _declare(f, model=True, effect="read", **options)

    return decorate if fn is None else decorate(fn)


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
    failed_on: Iterable[type[BaseException]] = (),
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
        failed_on=tuple(failed_on),
        retry=retry,
        timeout=timeout,
        key=key,
    )
