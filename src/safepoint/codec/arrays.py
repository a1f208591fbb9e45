"""The rows of the type table for numpy: arrays and scalars of every dtype without Python objects.

numpy is never imported here unless the application trusts it by name: whoever has an array has imported it, and a program that has
not cannot use one.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from typing import Any

from safepoint.codec.kinds import Fault, Kind, damaged, type_name
from safepoint.codec.registry import Registry
from safepoint.errors import RefusedType

__all__ = ["ARRAY_KINDS", "array_tag"]

# The whole of what a stored name of a dtype can be: np.dtype itself also takes "O", "f8,f8" and much else.
_PLAIN = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c(?:8|16)|[SUV][1-9][0-9]{0,8}|[mM]8(?:\[(?:[1-9][0-9]{0,8})?(?:[YMWDhms]|[munpfa]s)\])?)",
    re.ASCII,
)
_MOST_DIMENSIONS = 64


def array_tag(cls: type) -> str | None:
    """The tag of numpy's own types, and of what passes for one; None for all other classes."""
    numpy = _imported()
    if numpy is None:
        return None
    if cls is numpy.ndarray:
        return "ndarray"
    return "npscalar" if issubclass(cls, numpy.generic) else None


def _imported() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy if hasattr(numpy, "generic") and hasattr(numpy, "ndarray") else None


def _numpy(registry: Registry) -> Any:
    if _imported() is None and registry.trusts("numpy"):
        importlib.import_module("numpy")
    numpy = _imported()
    if numpy is None:
        raise Fault(
            RefusedType,
            "it is a value of numpy, which this program has not imported",
            "Import numpy before loading, or open(trust=['numpy'])",
            type="numpy",
        )
    return numpy


# Types of items. A simple one is stored by its text ("<f8"), a structured one as JSON of what makes it.


def _refused(dtype: Any, why: str = "", remedy: str = "Convert it with astype, or store its parts") -> Fault:
    return Fault(RefusedType, why or f"its dtype {str(dtype)[:80]} cannot be stored", remedy, type="numpy.ndarray")


def _text(dtype: Any) -> str:
    spec = _spec(dtype)
    return spec if type(spec) is str else json.dumps(spec, separators=(",", ":"))


def _spec(dtype: Any, *, field: bool = False) -> Any:
    if dtype.hasobject:
        raise _refused(dtype, "its items are Python objects", "Store a list, or an array of another dtype")
    if dtype.metadata or dtype.itemsize == 0:
        raise _refused(dtype)
    if dtype.subdtype is not None and field:
        base, shape = dtype.subdtype
        return [_spec(base), list(shape)]
    if dtype.names is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        if dtype.type is not sys.modules["numpy"].void or any(len(each) > 2 for each in fields):  # a recarray's; titles
            raise _refused(dtype)
        return {
            "names": list(dtype.names),
            "formats": [_spec(each[0], field=True) for each in fields],
            "offsets": [each[1] for each in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    text: str = dtype.str
    if not _PLAIN.fullmatch(text):
        raise _refused(dtype)  # long doubles are not the same on every machine; StringDType lies elsewhere in memory
    return text


def _dtype(text: Any, numpy: Any) -> Any:
    if type(text) is not str:
        raise damaged("a dtype without text")
    dtype = _made(json.loads(text) if text[:1] == "{" else text, numpy)
    if _text(dtype) != text:
        raise damaged("a dtype that was not written by safepoint")
    return dtype


def _made(spec: Any, numpy: Any) -> Any:
    if type(spec) is str:
        if not _PLAIN.fullmatch(spec):
            raise damaged("a dtype that was not written by safepoint")
        return numpy.dtype(spec)
    if type(spec) is list:
        base, shape = spec
        return numpy.dtype((_made(base, numpy), tuple(shape)))
    parts = {**spec, "formats": [_made(each, numpy) for each in spec["formats"]]}
    return numpy.dtype(parts, align=parts.pop("aligned"))


# Arrays: [dtype, "C" or "F", writeable, bytes of the items, *shape]


def _array_reduce(value: Any, _registry: Registry) -> list[Any]:
    flags = value.flags
    order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    return [_text(value.dtype), order, flags.writeable, value.tobytes(order), *value.shape]


def _array_revive(payload: Any, _name: str, registry: Registry) -> Any:
    numpy = _numpy(registry)
    text, order, writeable, data, *shape = payload
    dtype = _dtype(text, numpy)
    if type(data) is not bytes or type(writeable) is not bool or order not in ("C", "F") or len(shape) > _MOST_DIMENSIONS:
        raise damaged("not the parts of an array")
    # Before anything is made: a few bytes must not ask for an array of a terabyte.
    if any(type(n) is not int or n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise damaged("an array whose shape is not that of its bytes")
    value = numpy.ndarray(tuple(shape), dtype, data, order=order)
    if value.flags.c_contiguous != (order == "C"):
        raise damaged("an array that was not written by safepoint")
    if dtype.kind == "b" and value.size and value.view(numpy.uint8).max() > 1:
        raise damaged("bools that are neither")
    return value.copy(order="K") if writeable else value


# Scalars: [name, number or text], or [dtype, bytes]


def _scalar_reduce(value: Any, _registry: Registry) -> list[Any]:
    cls, dtype = type(value), value.dtype
    kind = dtype.kind
    if dtype.type is not cls or (kind in "fc" and not _PLAIN.fullmatch(dtype.str)):
        raise Fault(RefusedType, f"the type {type_name(cls)} cannot be stored", "Convert it", type=type_name(cls))
    if kind == "U":
        return ["U", str.__str__(value)]  # not its item: numpy takes NULs at the end away
    if kind == "S":
        return ["S", bytes.__getitem__(value, slice(None))]
    if kind in "biuf":
        return [dtype.str[1:], value.item()]
    if kind != "V":  # scalars have the byte order of the machine
        dtype = dtype.newbyteorder("<")
    return [_text(dtype), sys.modules["numpy"].asarray(value).astype(dtype).tobytes()]


def _scalar_revive(payload: Any, _name: str, registry: Registry) -> Any:
    numpy = _numpy(registry)
    text, data = payload
    if type(text) is not str:
        raise damaged("a scalar without dtype")
    if text in ("U", "S"):
        if type(data) is not (str if text == "U" else bytes):
            raise damaged("not the parts of a scalar")
        return (numpy.str_ if text == "U" else numpy.bytes_)(data)
    if type(data) is not bytes:
        dtype = _dtype(("|" if text[1:] == "1" else "<") + text, numpy)
        with numpy.errstate(all="ignore"):
            value = dtype.type(data)
        back = value.item()
        if type(back) is not type(data) or (back != data and data == data):  # noqa: PLR0124 (NaN)
            raise damaged("a scalar that was not written by safepoint")
        return value
    dtype = _dtype(text, numpy)
    if dtype.itemsize != len(data) or dtype.kind not in "cmMV":
        raise damaged("not the parts of a scalar")
    return numpy.frombuffer(data, dtype).copy()[0]


ARRAY_KINDS: tuple[Kind, ...] = (
    Kind(38, "ndarray", (), _array_reduce, _array_revive),
    Kind(39, "npscalar", (), _scalar_reduce, _scalar_revive),
)
