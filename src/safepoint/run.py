"""A run: a live process's exclusive hold of a task. What agent code talks to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from safepoint.calling import Validate
from safepoint.errors import UsageError
from safepoint.model import Checkpoint
from safepoint.script import Script, drive, no_running_loop
from safepoint.session import RunBase
from safepoint.steps import NamedSteps, SkipIf
from safepoint.streaming import Collect, Feed, Stream
from safepoint.tools import Bound, Tool, current

if TYPE_CHECKING:
    from safepoint.checkpointer import Checkpointer


class Run(NamedSteps, RunBase):
    """A sync run, from ``cp.resume``. Use it as a context manager; the lease is released on exit.

    Raises on creation: LeaseHeld (a live run holds the task), InDoubt (a person must settle a call first), and what loading
    raises.
    """

    def __init__(self, cp: Checkpointer, task_id: str | None, **options: Any) -> None:
        no_running_loop("resume", "open_async(…).resume")
        super().__init__(cp, task_id, **options)
        self._drive(self._begin())

    def _drive(self, script: Script[Any]) -> Any:
        return drive(script, self._loop)

    def __enter__(self) -> Self:
        self._check()
        before = current.get()
        try:
            self._enter_context()
        except BaseException:
            current.set(before)
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._exit_context()
            if self._closed:
                return
            public = self._drive(self._leave(error))
        except BaseException:
            self._exit_context()
            self._drive(self._release(None, "interrupted"))  # Ctrl-C on the way out: nothing is done if it was let go of
            raise
        if public is not None:
            raise public from error

    def close(self) -> None:
        """Release the task without an exception, as leaving the ``with`` block does."""
        self.__exit__(None, None, None)

    def call(
        self, target: Any, /, *args: Any, call_id: str | None = None, validate: Validate | None = None, **kwargs: Any
    ) -> Any:
        """Call a tool or model through the journal and return its result, live or recorded.

        Args:
            target: Made by ``@tool`` or ``@model``.
            args, kwargs: Its arguments. (A parameter of the tool named ``call_id`` or ``validate`` is given through
                ``call_tool``.)
            call_id: The id that the model gave; counts within its reply. Needed from threads of your own.
            validate: Called with the result of a ``read`` or ``idempotent`` call; if it raises, the reply counts as failed
                and is asked again as the tool's ``retry`` says. What it returns is ignored.

        Raises:
            CallFailed: the tool raised, now or when it was first called.
            CallMismatch, CallInProgress, RefusedType, UsageError: nothing was run.
            RunEnded: the run is over: a call in doubt, the lease lost, a pause. Let it through.
        """
        return self._drive(self._call_script(target, None, args, kwargs, call_id, validate))

    def call_tool(
        self, target: Any, arguments: Mapping[str, Any] | str, *, call_id: str | None = None, validate: Validate | None = None
    ) -> Any:
        """``call`` with arguments as a model gives them: a mapping by parameter name, or its JSON text."""
        ready = target.from_json(arguments) if isinstance(target, Tool) else {}
        return self._drive(self._call_script(target, ready, (), {}, call_id, validate))

    def stream(
        self, target: Any, /, *args: Any, call_id: str | None = None, collect: Collect | None = None, **kwargs: Any
    ) -> Stream:
        """Call a model whose reply comes in chunks, and pass them on as they come.

        ``for chunk in (stream := run.stream(ask, messages)): …``, then ``stream.reply()``. The whole reply is recorded when its
        stop reason has come, and a stream that is cut or left before is no reply: a resume asks again. Where the reply is on record
        already, the model is not asked: chunks are made of it, which hold the same texts in fewer pieces (``stream.replayed``).

        Args:
            target: Made by ``@model``; returns a stream of OpenAI (Chat Completions, Responses) or Anthropic, as objects or dicts,
                or is a generator of such chunks.
            args, kwargs, call_id: As in ``call``.
            collect: For other chunks: a function from the list of all of them to the reply, which is then whole when the stream
                ends by itself; or a ``Collector`` class.

        Raises:
            While it is iterated over, what ``call`` raises; CallFailed also for a cut stream. What failed after its first chunk is
            not tried again by ``retry``.
        """
        feed = Feed(collect)
        return Stream(self, self._stream_script(target, args, kwargs, call_id, feed), feed)

    def call_many(self, calls: Sequence[Bound], *, max_parallel: int = 8, return_errors: bool = False) -> list[Any]:
        """Make calls at the same time, each journaled; wait for all; return the results in order.

        With ``return_errors`` a ``CallFailed`` stands in its place in the list; else the first one is raised when all have
        ended.
        """
        return self._drive(self._many_script(calls, max_parallel, return_errors))  # type: ignore[no-any-return]

    def step(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        needs: Iterable[str] = (),
        pure: bool = False,
        optional: bool = False,
        skip_if: SkipIf = None,
        **kwargs: Any,
    ) -> Any:
        """Return what ``fn(*args, **kwargs)`` returns, running it only if its product is not there from before, unchanged.

        In the handle a step that ran ends with a save; in a ``run_agent`` step its product is saved with that step. See
        docs/steps.md for what becomes of a product that is lost.

        Args:
            name: Names the product in this task.
            args, kwargs: Values that can be stored. If they change, the step runs again, and with it all that was made from
                its product.
            needs: Names of the products that it is made from, which ``run.product(name)`` gives.
            pure: The product follows from the arguments and needs alone. Where it comes out equal, what was made from it stands.
            optional: If it raises, its product is None; if it is lost, what was made from it stands.
            skip_if: If true, or if it says so when called, the step is not run and its product is None.

        Raises:
            UsageError: something that it needs has not been run, or must be run again first. Damaged: it is lost.
            RefusedType: an argument, or the product, cannot be stored.
            Whatever ``fn`` raises; nothing is kept then, and a second try is served what its calls recorded.
        """
        options: dict[str, Any] = {"needs": needs, "pure": pure, "optional": optional, "skip_if": skip_if}
        return self._drive(self._step_script(name, fn, args, kwargs, **options))

    def _fits(self, name: str, awaits: bool) -> None:
        if awaits:
            raise UsageError(f"step {name!r} is async", "this run is sync", "Make it a plain function, or use an async run.")

    def save(self, label: str | None = None) -> Checkpoint:
        """End a step: count it and make it durable.

        Raises:
            LeaseLost through RunEnded; RefusedType, InvalidState, Unavailable, StoreFull: nothing was saved.
        """
        return self._drive(self._save_script(label))  # type: ignore[no-any-return]

    def pause(self, name: str, question: Any = None) -> Any:
        """Ask a person. The first time this ends the run; once answered, the re-run step gets the answer here."""
        return self._drive(self._pause_script(name, question))
