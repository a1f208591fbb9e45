"""Bytes to and from Redis, and what a URL says of its server."""

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection

from safepoint.errors import UsageError
from safepoint.stores.redis.nodes import settings_of
from safepoint.stores.redis.wire import APART, Refused, packed, replies


def sent(value):
    """A value as a server writes it."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, str):
        return b"+%s\r\n" % value.encode()
    return b"*%d\r\n%s" % (len(value), b"".join(map(sent, value)))


def read(chunks, count, timeout=5.0):
    """What ``replies`` makes of bytes that come in these pieces."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def write():
            for chunk in chunks:
                theirs.sendall(chunk)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            return replies(ours, count, time.monotonic() + timeout)
        finally:
            thread.join()


values = st.recursive(
    st.none() | st.binary(max_size=40) | st.integers(-(2**63), 2**63 - 1) | st.sampled_from(["OK", ""]),
    lambda inner: st.lists(inner, max_size=5),
)


@given(st.lists(values, min_size=1, max_size=4), st.lists(st.integers(1, 30), max_size=40))
def test_answers_come_out_as_they_went_in_wherever_they_are_cut(answers, cuts):
    data = b"".join(map(sent, answers))
    chunks, at = [], 0
    for cut in cuts:
        chunks.append(data[at : at + cut])
        at += cut
    chunks.append(data[at:])

    def plain(value):
        return value.encode() if isinstance(value, str) else [plain(v) for v in value] if isinstance(value, list) else value

    assert read(chunks, len(answers)) == [plain(a) for a in answers]


def test_big_values_come_in_pieces():
    big = bytes(range(256)) * 20_000
    assert read([sent([big, b"x", big])], 1) == [[big, b"x", big]]


def test_an_error_is_in_its_place_and_has_a_code():
    first, error, last = read([b"$1\r\na\r\n-MOVED 7 h:1\r\n:3\r\n"], 3)
    assert (first, last) == (b"a", 3)
    assert isinstance(error, Refused)
    assert (error.code, str(error)) == ("MOVED", "MOVED 7 h:1")


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b":1\r\n:2\r\n"])
def test_what_is_no_answer_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        read([data], 1)


def test_a_line_that_ends_or_is_silent_is_an_error_of_the_system():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"$5\r\nab")
        theirs.close()
        with pytest.raises(OSError, match="closed"):
            replies(ours, 1, time.monotonic() + 5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            replies(ours, 1, time.monotonic() + 0.05)
        assert time.monotonic() - begun < 2


def test_commands_are_packed_and_big_arguments_sent_as_they_are():
    big = b"x" * APART
    pieces = packed([("GET", b"k\0"), ("SET", "\N{SNOWMAN}", big), ("X", -3)])
    assert any(piece is big for piece in pieces)
    whole = b"".join(pieces)
    assert whole.startswith(b"*2\r\n$3\r\nGET\r\n$2\r\nk\0\r\n*3\r\n$3\r\nSET\r\n$3\r\n\xe2\x98\x83\r\n$65536\r\nxx")
    assert whole.endswith(b"xx\r\n*2\r\n$1\r\nX\r\n$2\r\n-3\r\n")


@pytest.mark.parametrize(
    ("url", "kind", "some"),
    [
        ("redis://h:7/3", Connection, {"host": "h", "port": 7, "db": 3}),
        ("valkey://h", Connection, {"host": "h"}),
        ("rediss://h?ssl_cert_reqs=none", SSLConnection, {"host": "h", "ssl_cert_reqs": "none"}),
        ("valkeys://u:p%40@h", SSLConnection, {"username": "u", "password": "p@"}),
        ("redis+unix:///a/b%20c?db=2", UnixDomainSocketConnection, {"path": "/a/b c", "db": 2}),
        ("redis://h?lease=5&ttl=3&client_name=x", Connection, {"client_name": "x"}),
    ],
)
def test_a_url_says_where_and_how(url, kind, some):
    found, settings = settings_of(url, {"lease", "ttl"})
    assert found is kind
    assert some.items() <= settings.items()
    assert not {"lease", "ttl"} & set(settings)


@pytest.mark.parametrize("query", ["colour=red", "decode_responses=true", "retry_on_timeout=1", "db=x", "max_connections=3"])
def test_a_url_that_says_what_cannot_be_is_refused(query):
    with pytest.raises(UsageError):
        settings_of(f"redis://u:hush@h?{query}", {"lease"})
