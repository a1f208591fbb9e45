"""A network that fails at a named point: a proxy between a client and a real server, on loopback.

    with Proxy(server.socket_path, "postgres") as proxy:
        life(proxy.postgres_url)                       # count the messages of a life first ...
        seen = dict(proxy.seen)
        for n in range(1, seen["up"] + 1):             # ... then let the network fail at each
            proxy.rewind()
            proxy.arm("cut", "up", n, "after")
            life(proxy.postgres_url)
            assert proxy.fired

Messages are counted from 1 in each direction, over all connections since the last ``rewind``: "up" is what clients send, "down"
what they get. A fault strikes at a message

- "before": it is not delivered any more,
- "inside": half of its bytes are,
- "after": it is; whether the other side still acts on it is open, as in life,
- "answer" (of messages up): it is, the server has worked it off and has answered, and nothing of the answer is delivered.

and it does one of these, once:

- "cut": both sides are closed; "reset": they are closed by a TCP reset;
- "half": whoever gets the messages of this direction sees the end of the stream; the other direction goes on;
- "delay": the direction stands for some seconds;
- "hold": nothing passes any more, in any connection, while all stay open, until ``heal()``, as where a cable was pulled. Then all
  that was held is delivered; or lost, with ``cut()`` before ``heal()``.

With ``outage=True`` new connections are refused from the fault on, until ``heal()``. One thread does all of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.support.wire import PROTOCOLS

__all__ = ["ACTIONS", "PARTS", "Loop", "Message", "Proxy"]

ACTIONS = ("cut", "reset", "half", "delay", "hold")
PARTS = ("before", "inside", "after", "answer")
FLUSH_WITHIN = 5.0


class Loop:
    """One thread that waits for sockets, and does what it is asked to from other threads in between."""

    def __init__(self, name: str) -> None:
        self._orders: deque[tuple[Callable[[], Any], threading.Event]] = deque()
        self._wake_out, self._wake_in = os.pipe()
        self._over = False
        self.error: BaseException | None = None
        """What ended the thread: shown at the next order and at the end, as a test must not believe in a dead proxy."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def do(self, order: Callable[[], Any]) -> None:
        """Let the thread do this, and wait until it is done."""
        if threading.current_thread() is self._thread:
            order()
            return
        done = threading.Event()
        self._orders.append((order, done))
        os.write(self._wake_in, b".")
        while not done.wait(0.05):
            if not self._thread.is_alive():
                break
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"{self._thread.name} has failed") from self.error

    def _run(self) -> None:
        try:
            while not self._over:
                self._turn()
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def _ready_now(self) -> dict[int, int]:
        poll = select.poll()
        for fd, events in self._wanted()[0].items():
            poll.register(fd, events)
        return dict(poll.poll(0))

    def _turn(self) -> None:
        wanted, until = self._wanted()
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        for fd, events in wanted.items():
            poll.register(fd, events)
        wait = None if until is None else max(0.0, until - time.monotonic()) * 1000 + 1
        ready = dict(poll.poll(wait))
        if ready.pop(self._wake_out, 0):
            os.read(self._wake_out, 4096)
        self._serve(ready)
        while self._orders:
            order, done = self._orders.popleft()
            try:
                order()
            finally:
                done.set()

    def _wanted(self) -> tuple[dict[int, int], float | None]:
        """Events by descriptor, and when to turn at the latest."""
        raise NotImplementedError

    def _serve(self, ready: dict[int, int]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Close everything."""
        raise NotImplementedError

    def _finish(self) -> None:
        self._over = True

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # told below
                self.do(self._finish)
        self._thread.join()
        os.close(self._wake_in)
        os.close(self._wake_out)
        self._raise()


def listening(port: int = 0) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(128)
    sock.setblocking(False)
    return sock


def connected(upstream: str | tuple[str, int]) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX if isinstance(upstream, str) else socket.AF_INET)
    try:
        sock.settimeout(FLUSH_WITHIN)
        sock.connect(upstream)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    if not isinstance(upstream, str):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def close_with_reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@dataclass(frozen=True)
class Message:
    """One message that went by."""

    direction: str
    number: int
    kind: str
    data: bytes = field(repr=False)
    connection: int


Which = int | Callable[[Message], bool]


@dataclass
class _Fault:
    action: str
    direction: str
    which: Which
    part: str
    seconds: float
    outage: bool

    def meets(self, message: Message) -> bool:
        if message.direction != self.direction:
            return False
        return self.which(message) if callable(self.which) else self.which == message.number


class _Way:
    """One direction of a connection."""

    def __init__(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        self.direction = direction
        self.source = source
        self.sink = sink
        self.queue: deque[tuple[bytes, str | None]] = deque()
        """What has come and not gone: bytes and kind, None for kind if a fault has had its say on them."""
        self.out = bytearray()
        self.stands_until = 0.0
        self.source_ended = False
        self.sink_ended = False

    def put(self, data: bytes) -> None:
        if not self.sink_ended:
            self.out += data
            self.flush(0)

    def flush(self, seconds: float) -> None:
        """Send what can be sent within this time; what a broken connection does not take is dropped."""
        end = time.monotonic() + seconds
        while self.out:
            try:
                del self.out[: self.sink.send(self.out)]
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0:
                    return
                select.select([], [self.sink], [], left)
            except OSError:
                self.end_sink()

    def end_sink(self) -> None:
        self.sink_ended = True
        self.out.clear()
        self.queue.clear()
        with contextlib.suppress(OSError):
            self.sink.shutdown(socket.SHUT_WR)

    def pull(self) -> bytes:
        try:
            data = self.source.recv(1 << 16)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.source_ended = not data
        return data


class _Connection:
    def __init__(self, number: int, client: socket.socket, server: socket.socket, protocol: str) -> None:
        self.number = number
        self.pair = PROTOCOLS[protocol]()
        self.up = _Way("up", client, server)
        self.down = _Way("down", server, client)
        self.ways = (self.up, self.down)
        self.asked = 0
        """Requests that were delivered to the server."""
        self.answered = 0
        self.withheld: tuple[int, _Fault] | None = None
        """The request whose answer is not delivered, and what happens when all of it is there."""
        self.kept: list[tuple[bytes, str | None]] = []
        self.closed = False

    def close(self, *, reset: bool) -> None:
        self.closed = True
        for sock in (self.up.source, self.up.sink):
            close_with_reset(sock) if reset else sock.close()

    @property
    def over(self) -> bool:
        return self.closed or all(way.sink_ended and way.source_ended for way in self.ways)


class Proxy(Loop):
    """Listens on ``port`` of 127.0.0.1 and hands on to ``upstream``: the path of a unix socket, or host and port."""

    def __init__(self, upstream: str | tuple[str, int], protocol: str = "raw") -> None:
        super().__init__("proxy")
        assert protocol in PROTOCOLS
        self.upstream = upstream
        self.protocol = protocol
        self.seen = {"up": 0, "down": 0}
        self.messages: list[Message] = []
        """What went by since the last rewind."""
        self.fired: Message | None = None
        """The message at which the fault struck."""
        self.opened = 0
        """Connections since the last rewind."""
        self._fault: _Fault | None = None
        self._holding = False
        self._connections: list[_Connection] = []
        self._listener: socket.socket | None = listening()
        self.port: int = self._listener.getsockname()[1]
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def postgres_url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    # -- what a test asks for

    def arm(
        self,
        action: str,
        direction: str = "up",
        which: Which = 1,
        part: str = "before",
        *,
        seconds: float = 0.0,
        outage: bool = False,
    ) -> None:
        """Let the fault strike at the message of this number, or the first that ``which(message)`` is true for.

        A condition is asked on the proxy's thread.
        """
        assert action in ACTIONS
        assert part in PARTS
        assert direction in {"up", "down"}
        assert direction == "up" or part != "answer", "only what a client sends is answered"
        assert (action == "delay") == (seconds > 0)
        fault = _Fault(action, direction, which, part, seconds, outage)
        self.do(lambda: self._arm(fault))

    def _arm(self, fault: _Fault) -> None:
        self._fault, self.fired = fault, None

    def rewind(self) -> None:
        """Count from 1 again, with no fault armed and all passing; connections stay as they are."""
        self.do(self._rewind)

    def _rewind(self) -> None:
        # A client that has closed its connection has said so, and the proxy may not have heard it yet.
        while not self._holding and (ready := self._ready_now()):
            self._serve(ready)
        self.seen = {"up": 0, "down": 0}
        self.messages = []
        self.opened = 0
        self._fault, self.fired = None, None
        self._heal()

    def cut(self) -> None:
        """Close all connections now, with what they hold."""
        self.do(lambda: self._close_all(reset=False))

    def reset(self) -> None:
        """Close all connections now, by a TCP reset."""
        self.do(lambda: self._close_all(reset=True))

    def hold(self) -> None:
        """Let nothing pass from now on; connections stay, and new ones are taken."""
        self.do(self._hold)

    def refuse(self) -> None:
        """Refuse new connections from now on."""
        self.do(self._refuse)

    def heal(self) -> None:
        """Let everything pass again, what was held first, and take connections."""
        self.do(self._heal)

    def wait_fired(self, seconds: float = 10.0) -> Message:
        end = time.monotonic() + seconds
        while self.fired is None:
            self._raise()
            assert time.monotonic() < end, f"the fault has not struck; seen: {self.seen}"
            time.sleep(0.001)
        return self.fired

    # -- on the thread

    def _hold(self) -> None:
        self._holding = True

    def _refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _heal(self) -> None:
        self._holding = False
        if self._listener is None:
            self._listener = listening(self.port)
        for connection in list(self._connections):
            self._move(connection)

    def _close_all(self, *, reset: bool) -> None:
        for connection in self._connections:
            connection.close(reset=reset)
        self._connections.clear()

    def _end(self) -> None:
        self._refuse()
        self._close_all(reset=False)

    def _wanted(self) -> tuple[dict[int, int], float | None]:
        wanted: dict[int, int] = {}
        until: list[float] = []
        now = time.monotonic()
        if self._listener is not None:
            wanted[self._listener.fileno()] = select.POLLIN
        for connection in self._connections:
            for way in connection.ways:
                # What is held or delayed stays in the kernel's buffers, as in a network.
                stands = self._holding or way.stands_until > now
                if way.stands_until > now:
                    until.append(way.stands_until)
                if not stands and not way.source_ended:
                    wanted[way.source.fileno()] = wanted.get(way.source.fileno(), 0) | select.POLLIN
                if way.out and not self._holding:
                    wanted[way.sink.fileno()] = wanted.get(way.sink.fileno(), 0) | select.POLLOUT
        return wanted, min(until, default=None)

    def _serve(self, ready: dict[int, int]) -> None:
        for connection in list(self._connections):
            for way in connection.ways:
                if not connection.closed and ready.get(way.source.fileno(), 0) & ~select.POLLOUT and not way.source_ended:
                    for kind, data in connection.pair.feed(way.direction, way.pull()):
                        way.queue.append((data, kind))
            self._move(connection)
        if self._listener is not None and ready.get(self._listener.fileno()):
            self._take()

    def _take(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            server = connected(self.upstream)
        except OSError:
            close_with_reset(client)
            return
        self.opened += 1
        self._connections.append(_Connection(self.opened, client, server, self.protocol))

    def _move(self, connection: _Connection) -> None:
        """Hand on what may go."""
        for way in connection.ways:
            while way.queue and not connection.closed and not self._holding and way.stands_until <= time.monotonic():
                data, kind = way.queue.popleft()
                self._pass(connection, way, data, kind)
            if connection.closed or self._holding:
                break
            way.flush(0)
            if way.source_ended and not way.queue and not way.out and not way.sink_ended:
                way.put(bytes(connection.pair.rest[way.direction]))
                way.end_sink()
        if connection.over:
            if not connection.closed:
                connection.close(reset=False)
            if connection in self._connections:
                self._connections.remove(connection)

    def _pass(self, connection: _Connection, way: _Way, data: bytes, kind: str | None) -> None:
        if kind is None:
            way.put(data)
            return
        self.seen[way.direction] += 1
        message = Message(way.direction, self.seen[way.direction], kind, data, connection.number)
        self.messages.append(message)
        if way.direction == "down" and self._is_withheld(connection, message):
            return
        if self._fault is not None and self._fault.meets(message):
            fault, self._fault = self._fault, None
            self._strike(connection, way, message, fault)
        else:
            way.put(data)
        if way.direction == "up":
            connection.asked += connection.pair.ends_request(kind)
        else:
            connection.answered += connection.pair.ends_answer(kind)

    def _is_withheld(self, connection: _Connection, message: Message) -> bool:
        if connection.withheld is None or connection.answered < connection.withheld[0]:
            return False
        connection.kept.append((message.data, None))
        if connection.pair.ends_answer(message.kind):
            connection.answered += 1
            fault, connection.withheld = connection.withheld[1], None
            connection.down.queue.extendleft(reversed(connection.kept))
            connection.kept = []
            self._act(connection, connection.down, message, fault)
        return True

    def _strike(self, connection: _Connection, way: _Way, message: Message, fault: _Fault) -> None:
        if fault.part == "answer":
            connection.withheld = (connection.asked, fault)
            way.put(message.data)
            return
        delivered = {"before": 0, "inside": max(1, len(message.data) // 2), "after": len(message.data)}[fault.part]
        way.put(message.data[:delivered])
        if delivered < len(message.data):
            way.queue.appendleft((message.data[delivered:], None))
        self._act(connection, way, message, fault)

    def _act(self, connection: _Connection, way: _Way, message: Message, fault: _Fault) -> None:
        if fault.outage:
            self._refuse()
        self.fired = message  # before the client can see anything of it
        for each in connection.ways:
            each.flush(FLUSH_WITHIN)
        if fault.action in {"cut", "reset"}:
            connection.close(reset=fault.action == "reset")
        elif fault.action == "half":
            way.end_sink()
        elif fault.action == "delay":
            way.stands_until = time.monotonic() + fault.seconds
        else:
            self._hold()
