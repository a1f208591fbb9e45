"""LangGraph's checkpoints, pending writes and metadata as what our stores keep, and back; pure.

A checkpoint is an ordinary state, so that every verb and command of safepoint reads it where LangGraph is not installed::

    {"messages": [], "agent_state": {channel: value, …}, "metadata": LangGraph's metadata, "step": …, "turns": [], "finished": False,
     "langgraph": {"v": 4, "ts": "…", "channel_versions": {…}, "versions_seen": {…}, "updated_channels": […]}}

``langgraph`` holds all else of the checkpoint but its id, which is the row's; keys that this version does not know are kept. The
plain forms that LangChain's and LangGraph's objects have in ``agent_state`` are in ``wrapping``. Lists are stored item by item, and
what a task wrote uses the same objects as the channel that it goes into.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from safepoint.adapters.langgraph.lazy import Base, Channels, Objects, Parts, Versions
from safepoint.adapters.langgraph.types import GraphRegistry, pairs_of
from safepoint.adapters.langgraph.wrapping import CLASS, unwrapped_value, wrapped_value
from safepoint.codec import chunks, states, values
from safepoint.codec.chunkread import Reader
from safepoint.codec.chunks import KEEP, Packed
from safepoint.codec.nodes import Split
from safepoint.codec.values import _is_text
from safepoint.errors import Damaged, InvalidState, RefusedType

__all__ = ["Base", "Form", "Loaded"]

PART: Final = "langgraph"
_APART: Final = frozenset({"id", "channel_values"})
_FEW: Final = 8
_PLAIN_PARTS: Final = frozenset({"v", "ts", "channel_versions", "versions_seen", "updated_channels"})
_PARTS: Final = ("channel_versions", "versions_seen")
_PLACE: Final = re.compile(r"(agent_state|write)\['([^']*)'\](\[\d+\])?(.*)", re.DOTALL)
_IN_FIELDS: Final = re.compile(r"^\['(?:fields|extra|private)'\]\['(\w+)'\]")
_LONG: Final = 120
"""Characters of a path inside a channel that are shown."""
P = TypeVar("P", bound=Packed)


class Loaded:
    """A checkpoint that was read, and what serves as the parent of the next one.

    Attributes:
        checkpoint: As LangGraph takes it; ``channel_values`` decodes each channel when it is first asked for. Where objects are yet
            to be fetched, versions that lie in some of their own are mappings that do that when they are looked at.
    """

    def __init__(self, parts: Parts, checkpoint_id: str) -> None:
        own = parts.part(PART, later=_PARTS)
        if type(own) is not dict or not all(type(own.get(key)) in (dict, Versions) for key in _PARTS):
            raise InvalidState(
                f"{parts.at} is no checkpoint of LangGraph's",
                "it was saved through another interface of safepoint",
                "Fork the thread from one that LangGraph has saved",
            )
        self._metadata: dict[str, Any] | None = None
        self._parts = parts
        if parts.fetched:
            self.metadata  # noqa: B018 - damage is told now
        for key in own.keys() - _PLAIN_PARTS:  # such as the ``pending_sends`` of earlier versions
            own[key] = unwrapped_value(own[key], f"{parts.at}: {key}")
        self.checkpoint: dict[str, Any] = {**own, "id": checkpoint_id, "channel_values": Channels(parts)}
        versions = own["channel_versions"]
        self._versions = dict(versions) if type(versions) is dict else None  # the caller may change the one in the checkpoint

    @property
    def metadata(self) -> dict[str, Any]:
        """LangGraph's metadata."""
        if self._metadata is None:
            found = self._parts.part("metadata")
            self._metadata = found if type(found) is dict else {}
        return self._metadata

    def __repr__(self) -> str:
        return f"<Loaded {self._parts.at}>"

    def base(self) -> Base:
        """To pack against. Decodes what has not been decoded."""
        if self._versions is None:
            self._versions = self._parts.part(PART)["channel_versions"]
        return Base.of(self._parts.packed(), self._versions)


class Form:
    """The form of one saver: which types it takes. Holds no state but that, so it can be shared by threads and copies.

    Args:
        types: Classes of the application that may be stored, beside those that a graph's schemas declare.
        trust: Modules all of whose classes may be stored, and which are imported to load one.
        allow: Pairs of module and class name, as LangGraph hands them to ``with_allowlist``.
    """

    def __init__(
        self, types: Iterable[type] = (), trust: Iterable[str] = (), allow: Iterable[tuple[str, ...] | type] = ()
    ) -> None:
        self.registry = GraphRegistry(types, trust, pairs_of(allow))

    def allowing(self, extra: Iterable[tuple[str, ...] | type]) -> Form:
        """A form that takes ``extra`` too; this one if it does already."""
        registry = self.registry.allowing(pairs_of(extra))
        if registry is self.registry:
            return self
        form = copy.copy(self)
        form.registry = registry
        return form

    # Checkpoints

    def pack(
        self,
        checkpoint: Mapping[str, Any],
        new_versions: Mapping[str, Any] | None = None,
        *,
        parent: Packed | Loaded | None = None,
        warm: tuple[Packed | Loaded, ...] = (),
        metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
        flat: bool = False,
    ) -> Base:
        """Pack a checkpoint.

        Args:
            checkpoint: With all its ``channel_values``.
            new_versions: The channels that changed since the parent. Any other that the parent has, in the same version, is taken
                from there without a look at the value. None: every value is looked at.
            parent: What the store is certain to hold: what it reaches may be left out of ``packed.new``.
            warm: Other packs to compare with, of whose objects nothing may be left out.
            metadata: LangGraph's, plain data.
            step: ``State.step``; by default that of the metadata, and 0 for a negative one.
            flat: For a store that is not chunked.

        Returns:
            What is for the store, and serves as parent of the next pack.

        Raises:
            RefusedType: some value is of a type that may not be stored; names its path.
        """
        base = _packed(parent)
        versions = _bare_versions(checkpoint["channel_versions"])
        kept: frozenset[str] | set[str] = frozenset()
        if isinstance(base, Base) and new_versions is not None and not flat:
            node = base._kids.get("agent_state")
            if type(node) is Split:
                kept = {
                    name
                    for name in node.kids.keys() - new_versions.keys()
                    if name in versions and base.versions.get(name) == versions[name]
                }
        for name in checkpoint["channel_values"]:
            if type(name) is not str or not _is_text(name):
                raise RefusedType(
                    "a channel has a name that is no text", "", "Use str without lone surrogates", type="key", path=""
                )
        own = {
            key: value if key in _PLAIN_PARTS else wrapped_value(value, self.registry, careful=True)
            for key, value in checkpoint.items()
            if key not in _APART
        }
        own["channel_versions"] = versions
        own["versions_seen"] = {node: _bare_versions(seen) for node, seen in checkpoint["versions_seen"].items()}
        metadata = dict(metadata or {})
        if step is None:
            step = metadata.get("step", 0)
        rest = {
            "metadata": metadata,
            "step": max(step, 0) if type(step) is int else 0,
            "turns": [],
            "finished": False,
            PART: own,
        }

        def pack(careful: bool) -> Base:
            channels = {
                name: KEEP if name in kept else wrapped_value(value, self.registry, careful=careful)
                for name, value in _items(checkpoint["channel_values"], kept)
            }
            tree = {"messages": [], "agent_state": channels, **rest}
            try:
                packed = chunks.pack(tree, self.registry, base=base, warm=_all_packed(warm), flat=flat)
            except RefusedType as error:
                raise _said_plainly(error, tree) from error.__cause__
            return Base.of(packed, versions, careful)

        return _again(pack, isinstance(base, Base) and base.careful)

    def unpack(
        self,
        root: bytes,
        refs: bytes,
        objects: Objects,
        *,
        id: str,
        size: int | None = None,
        at: str = "the checkpoint",
        marked: bool = False,
    ) -> Loaded:
        """The checkpoint that ``pack`` was given. Digest and seal of the row are the caller's to check, by ``states.check_row``.

        Args:
            root, refs, size: Of the row.
            objects: Those that the root reaches, each verified when it is read; or what fetches them, called when one is needed.
            id: The row's.
            at: Names the row in errors.
            marked: Whether lists are made ready for a comparison in the next pack. It costs a tenth more here, and saves that pack
                what encoding the lists takes.

        Raises:
            Damaged, RefusedType, InvalidState: here, and when a channel is asked for.
        """
        return Loaded(Parts(root, refs, objects, self.registry, size, at, marked), id)

    # Pending writes

    def pack_writes(
        self,
        writes: Sequence[tuple[str, Any]],
        *,
        base: Packed | Loaded | None = None,
        warm: tuple[Packed | Loaded, ...] = (),
        flat: bool = False,
    ) -> Packed:
        """Pack what a task wrote: ``{"channels": [names], "0": value, "1": value, …}``. ``base``, ``warm`` as for ``pack``.

        Of a list of a few items, ``"channels"`` has ``[name, items]``, and each item stands for itself as ``"0.0"``, ``"0.1"`` …: it
        is the object that the channel will have, and there is no list to store beside it.
        """

        def pack(careful: bool) -> Packed:
            channels: list[Any] = []
            tree: dict[str, Any] = {"channels": channels}
            for i, (channel, value) in enumerate(writes):
                plain = wrapped_value(value, self.registry, careful=careful)
                if type(value) is list and len(value) <= _FEW:
                    channels.append([channel, len(plain)])
                    tree |= {f"{i}.{j}": item for j, item in enumerate(plain)}
                else:
                    channels.append(channel)
                    tree[str(i)] = plain
            try:
                return chunks.pack(
                    tree, self.registry, base=_packed(base), warm=_all_packed(warm), opened=False, path="write", flat=flat
                )
            except RefusedType as error:
                raise _said_plainly(error, {"write": tree}) from error.__cause__

        return _again(pack, False)

    def unpack_writes(
        self, root: bytes, refs: bytes, objects: Objects, *, size: int | None = None, at: str = "a write"
    ) -> list[tuple[str, Any]]:
        """What ``pack_writes`` was given.

        Raises:
            Damaged, RefusedType
        """
        found = objects() if callable(objects) else objects
        tree = Reader(found, self.registry, None, size).mapping(root, refs, at, 0)[0]
        plain: list[tuple[str, Any]] = []
        try:
            for i, channel in enumerate(tree.pop("channels")):
                if type(channel) is list:
                    name, count = channel
                    value: Any = [tree.pop(f"{i}.{j}") for j in range(count)]
                else:
                    name, value = channel, tree.pop(str(i))
                if type(name) is not str:
                    raise ValueError
                plain.append((name, value))
            whole = not tree
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise Damaged(f"{at} cannot be loaded", "it is no whole set of writes", "Load an earlier checkpoint.")
        return [(name, unwrapped_value(value, f"{at}: channel {name!r}")) for name, value in plain]

    # Metadata

    def pack_metadata(self, metadata: Mapping[str, Any]) -> bytes:
        """LangGraph's metadata for a row's header, where ``list(filter=)`` finds it without a body.

        Raises:
            InvalidState: it takes more than 8 KB. RefusedType: it is not of the type table.
        """
        return states.encode_metadata(dict(metadata), self.registry)

    def unpack_metadata(self, data: bytes) -> dict[str, Any]:
        """What ``pack_metadata`` was given."""
        found = values.decode(data, self.registry, path="metadata") if data else {}
        if type(found) is not dict:
            raise Damaged("the metadata cannot be loaded", "it is no mapping", "Load an earlier checkpoint.")
        return cast(dict[str, Any], found)


def _packed(base: Packed | Loaded | None) -> Packed | None:
    return base.base() if isinstance(base, Loaded) else base


def _all_packed(warm: tuple[Packed | Loaded, ...]) -> tuple[Packed, ...]:
    return tuple([base.base() if isinstance(base, Loaded) else base for base in warm])


def _items(channel_values: Mapping[str, Any], kept: frozenset[str] | set[str]) -> list[tuple[str, Any]]:
    """Channels and values; of those that are kept no value is asked for, since that would decode it."""
    return [(name, None if name in kept else channel_values[name]) for name in channel_values]


def _bare_versions(versions: Mapping[str, Any]) -> dict[str, Any]:
    """Versions without what a saver's own subclasses of int and str carry."""
    return {name: _bare(version) for name, version in versions.items()}


def _bare(version: Any) -> Any:
    for cls in (int, str, float):
        if isinstance(version, cls):
            return version if type(version) in (cls, bool) else cls(version)
    return version


def _again(pack: Callable[[bool], P], careful: bool) -> P:
    """Pack, and once more with care if something was refused: most messages need no look into them."""
    if not careful:
        try:
            return pack(False)
        except RefusedType:
            pass
    return pack(True)


def _said_plainly(error: RefusedType, tree: Mapping[str, Any]) -> RefusedType:
    """The error with the path that the value has for the application, and not in its plain form."""
    path = str(error.details.get("path", ""))
    found = _PLACE.match(path)
    if found is None:
        return error
    part, name, index, rest = found.groups()
    wrapper = tree.get(part, {}).get(name)
    if index and type(wrapper) is list:
        wrapper = wrapper[int(index[1:-1])]
        name_, index_ = name, index
    else:
        name_, rest, index_ = name, (index or "") + rest, ""
    if type(wrapper) is dict and CLASS in wrapper:
        rest = _IN_FIELDS.sub(r".\1", rest.removeprefix("['value']"), 1)
    number, _, item = name_.partition(".")
    if part == "write" and number.isdecimal():
        channel = tree[part]["channels"][int(number)]
        place = f"write to channel {channel[0] if type(channel) is list else channel!r}" + (f"[{item}]" if item else "")
    else:
        place = f"channel {name_!r}"
    rest = f"{index_}{rest}"
    if len(rest) > _LONG:  # the ends tell where it is
        end = rest[-_LONG // 3 :]
        rest = f"{rest[: _LONG // 2]}…{end[max(0, end.find('[')) :]}"
    shown = f"{place}{rest}"
    error.what = error.what.replace(path, shown, 1)
    error.details["path"] = shown
    return error
