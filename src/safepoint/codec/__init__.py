"""Python objects to bytes and back. Pure: no I/O, no store, no clock."""

from safepoint.codec.jsonform import from_json, to_json
from safepoint.codec.registry import GLOBAL, Registry, register
from safepoint.codec.resource import Resource, masked
from safepoint.codec.values import MAX_DEPTH, REF_CODE, Tagged, decode, decode_plain, encode, encode_tree, prepare, ref

__all__ = [
    "GLOBAL",
    "MAX_DEPTH",
    "REF_CODE",
    "Registry",
    "Resource",
    "Tagged",
    "decode",
    "decode_plain",
    "encode",
    "encode_tree",
    "from_json",
    "masked",
    "prepare",
    "ref",
    "register",
    "to_json",
]
