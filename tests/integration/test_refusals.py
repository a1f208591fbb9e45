"""What is refused on the way in, and that the error names the place and the remedy."""

import threading

import pytest

from safepoint import Done, InDoubt, RefusedType, tool

CANARY = "c4n4ry"


class NotStorable:
    def __repr__(self):
        return CANARY


# -- results


@tool(name="refusals-make", effect="read")
def make():
    return [1, {"a": NotStorable()}]


@tool(name="refusals-act")
def act():
    raise ConnectionResetError("no reply")


def test_a_result_that_cannot_be_stored_is_named_by_its_path(cp):
    with pytest.raises(RefusedType, match=r"result\[1\]\['a'\]") as caught, cp.resume("t") as run:
        run.call(make)
    assert CANARY not in str(caught.value)


def test_a_word_that_cannot_be_stored_is_named_by_its_path(cp):
    with pytest.raises(InDoubt), cp.resume("t") as run:
        run.call(act)
    with pytest.raises(RefusedType, match=r"result\['lock'\]"):
        cp.resolve("t", 1, Done({"lock": threading.Lock()}))
    assert cp.resolve("t", 1, Done({"ok": 1})).result == {"ok": 1}
    assert cp.calls("t")[0].result == {"ok": 1}
