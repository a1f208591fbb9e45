"""The policy of a tool, as it is stored with each of its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Replan = Literal["park", "execute", "reuse"]
REPLAN: tuple[str, ...] = ("park", "execute", "reuse")


@dataclass(frozen=True, slots=True)
class Policy:
    """What is stored with each call of how it is to be treated; see DESIGN 6 for the rules it feeds."""

    verify: bool = False
    final: bool = False
    dedups: bool = False
    settle: float = 2.0
    key_ttl: float | None = None
    replan: Replan = "park"
    key: bool = False
    attempts: int = 1
    model: bool = False

    def encode(self) -> bytes:
        # Only what differs from the default: a row is written for every call.
        plain = {f: getattr(self, f) for f in self.__slots__ if getattr(self, f) != _DEFAULT_POLICY[f]}
        return msgspec.msgpack.encode(plain) if plain else b""

    @classmethod
    def decode(cls, data: bytes) -> Policy:
        plain = msgspec.msgpack.decode(data) if data else {}
        return cls(**{k: v for k, v in plain.items() if k in _DEFAULT_POLICY})  # a newer minor version may know more


_DEFAULT_POLICY: dict[str, Any] = {}
_DEFAULT_POLICY.update({f: getattr(Policy(), f) for f in Policy.__slots__})
