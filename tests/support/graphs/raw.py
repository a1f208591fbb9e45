"""Checkpoints made by hand, as LangGraph's loop makes them, for tests of a saver without a graph."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.base.id import uuid6

NULL = "00000000-0000-0000-0000-000000000000"


def thread(name: Any = None, ns: str = "", id: str | None = None, **more: Any) -> dict[str, Any]:
    where = {"thread_id": str(uuid.uuid4()) if name is None else name, "checkpoint_ns": ns, **more}
    return {"configurable": where | ({"checkpoint_id": id} if id else {})}


def made(values: dict[str, Any] | None = None, versions: dict[str, Any] | None = None, id: str | None = None) -> dict[str, Any]:
    """A checkpoint; each value has version 1 if nothing else is said."""
    values = values or {}
    return {
        "v": 4,
        "id": id or str(uuid6(clock_seq=-1)),
        "ts": datetime.now(UTC).isoformat(),
        "channel_values": values,
        "channel_versions": dict.fromkeys(values, 1) if versions is None else versions,
        "versions_seen": {},
        "updated_channels": None,
    }


def about(step: int = 0, source: str = "loop", **more: Any) -> dict[str, Any]:
    return {"source": source, "step": step, "parents": {}, **more}


def id_of(config: dict[str, Any]) -> str:
    found: str = config["configurable"]["checkpoint_id"]
    return found


def task_id(i: int) -> str:
    return f"{i:08x}-0000-0000-0000-00000000000a"


class InSync(BaseCheckpointSaver[Any]):
    """The asynchronous methods of a saver, by its sync ones: so that a suite for those tests these."""

    def __init__(self, saver: Any) -> None:
        super().__init__()
        self.saver = saver

    async def aget_tuple(self, config: Any) -> Any:
        return self.saver.get_tuple(config)

    async def alist(self, config: Any, *, filter: Any = None, before: Any = None, limit: Any = None) -> Any:
        for found in self.saver.list(config, filter=filter, before=before, limit=limit):
            yield found

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        return self.saver.put(config, checkpoint, metadata, new_versions)

    async def aput_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        self.saver.put_writes(config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        self.saver.delete_thread(thread_id)

    async def adelete_for_runs(self, run_ids: Any) -> None:
        self.saver.delete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.saver.copy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Any, *, strategy: str = "keep_latest") -> None:
        self.saver.prune(thread_ids, strategy=strategy)


def delta_history(saver: Any, config: Any, *channels: str) -> dict[str, Any]:
    """By the sync method and the async one, which have to agree."""
    found = saver.get_delta_channel_history(config=config, channels=channels)
    assert asyncio.run(saver.aget_delta_channel_history(config=config, channels=channels)) == found
    return {channel: {**entry, "writes": [tuple(write) for write in entry["writes"]]} for channel, entry in found.items()}
