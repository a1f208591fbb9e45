"""The journal as a middleware of LangChain's ``create_agent``. Needs the package ``langchain``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from safepoint.errors import MissingExtra

try:
    from langchain.agents.middleware import AgentMiddleware
    from langchain.agents.middleware.types import ModelRequest, ModelResponse
except ModuleNotFoundError as error:
    raise MissingExtra(
        "ToolJournal.middleware needs the package langchain", "it is not installed", 'Run: pip install "langchain>=1,<2"'
    ) from error

if TYPE_CHECKING:
    from safepoint.adapters.langgraph.journal import ToolJournal

__all__ = ["JournalMiddleware"]


class JournalMiddleware(AgentMiddleware):
    """Records tool calls, and model replies if that is wanted. Made by ``ToolJournal.middleware``.

    Put it last: what other middlewares do around a call is then done anew, and what is recorded is the call itself.
    """

    def __init__(self, journal: ToolJournal, *, model: bool) -> None:
        super().__init__()
        self.journal = journal
        self.model = model

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return self.journal.wrap_tool_call(request, handler)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await self.journal.awrap_tool_call(request, handler)

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]) -> Any:
        if not self.model:
            return handler(request)
        return _reply(self.journal.model_call(_name(request), lambda: _plain(handler(request))))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> Any:
        if not self.model:
            return await handler(request)

        async def ask() -> Any:
            return _plain(await handler(request))

        return _reply(await self.journal.amodel_call(_name(request), ask))


def _name(request: ModelRequest[Any]) -> str:
    model = request.model
    for attribute in ("model_name", "model"):
        if isinstance(name := getattr(model, attribute, None), str) and name:
            return name
    return type(model).__name__


def _plain(response: ModelResponse[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"result": list(response.result)}
    if response.structured_response is not None:
        found["structured"] = response.structured_response
    return found


def _reply(found: dict[str, Any]) -> ModelResponse[Any]:
    return ModelResponse(result=found["result"], structured_response=found.get("structured"))
