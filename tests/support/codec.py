"""What the tests of the value codec share."""

from typing import Any

import msgspec
import pytest

from safepoint.codec import Registry, decode, encode
from safepoint.codec.classes import KINDS
from safepoint.errors import RefusedType
from tests.support.samples import REGISTRY

__all__ = ["EMPTY", "Ext", "ext", "pack", "refused", "trip"]

EMPTY = Registry(parent=None)
Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode


def trip(value: Any, registry: Registry = REGISTRY) -> Any:
    return decode(encode(value, registry), registry)


def ext(tag: str, payload: Any, name: str | None = None) -> bytes:
    """Hand-made bytes of one row of the table."""
    return pack(Ext(KINDS[tag].code, pack(payload if name is None else [name, payload])))


def refused(value: Any, registry: Registry = EMPTY, path: str = "agent_state") -> RefusedType:
    with pytest.raises(RefusedType) as caught:
        encode(value, registry, path=path)
    return caught.value
