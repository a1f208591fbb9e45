"""A pooler for PostgreSQL in transaction mode, as pgbouncer is, that shows what does not survive one.

    with Pooler(server.socket_path) as pooler:
        psycopg.connect(pooler.url)

A client holds a server connection from its first message to the ReadyForQuery that says that no transaction is open; its next
transaction gets ANOTHER one on purpose, and nothing is cleaned in between (pgbouncer's server_reset_query is not used in this
mode). So a SET, an advisory lock of the session, a temporary table, a LISTEN or a prepared statement that one transaction leaves
is not there in the next, and is found by somebody else. Statements are not renamed: what newer pgbouncers can do
(max_prepared_statements) is off in many installations.

As in pgbouncer, startup parameters other than a few are refused, ``options`` among them; those few follow the client from server
to server. A client that leaves in the middle of a transaction takes the server connection with it. One thread does all of it.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
from collections import deque
from types import TracebackType
from typing import Self

from tests.support.proxy import Loop, close_with_reset, connected, listening
from tests.support.wire import CANCEL, PostgresPair, postgres_message

__all__ = ["Pooler"]

FOLLOWS = {
    "client_encoding": "client_encoding",
    "datestyle": "DateStyle",
    "timezone": "TimeZone",
    "standard_conforming_strings": "standard_conforming_strings",
    "application_name": "application_name",
}
"""Settings that follow a client, by their names in lower case."""


def error(code: str, text: str) -> bytes:
    fields = {"S": "FATAL", "V": "FATAL", "C": code, "M": text}
    return postgres_message("E", b"".join(f"{k}{v}\0".encode() for k, v in fields.items()) + b"\0")


def strings(body: bytes) -> list[str]:
    return [part.decode() for part in body.split(b"\0")]


class PoolerError(Exception):
    """The server refused a connection; holds what it said, to be handed on."""

    def __init__(self, message: bytes) -> None:
        super().__init__(message)
        self.message = message


class _End:
    """A connection with a client or a server."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pair = PostgresPair()
        self.out = bytearray()
        self.settings: dict[str, str] = {}
        self.closed = False

    def put(self, data: bytes) -> None:
        self.out += data
        self.flush()

    def flush(self) -> None:
        try:
            while self.out:
                del self.out[: self.sink.send(self.out)]
        except BlockingIOError:
            pass
        except OSError:
            self.out.clear()  # gone: reading will tell

    @property
    def sink(self) -> socket.socket:
        return self.sock

    def pull(self) -> bytes | None:
        """What has come; None at the end."""
        try:
            return self.sock.recv(1 << 16) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def note_setting(self, message: bytes) -> None:
        name, value = strings(message[5:])[:2]
        self.settings[name] = value

    def close(self) -> None:
        self.closed = True
        self.sock.close()


class _Server(_End):
    def __init__(self, upstream: str | tuple[str, int], login: tuple[str, str], number: int) -> None:
        super().__init__(connected(upstream))
        self.login = login
        self.number = number
        self.client: _Client | None = None
        self.key = b""
        self.swallow = 0
        """Answers to the pooler's own requests, of which the client hears nothing."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        user, database = self.login
        named = f"user\0{user}\0database\0{database}\0\0".encode()
        self.put(struct.pack(">II", len(named) + 8, 196608) + named)
        while True:
            select.select([self.sock], [], [], 10)
            data = self.pull()
            if data is None:
                raise PoolerError(error("08P01", "server login has failed"))
            for kind, message in self.pair.feed("down", data):
                if kind == "E":
                    raise PoolerError(message)
                if kind == "S":
                    self.note_setting(message)
                elif kind == "K":
                    self.key = message[5:]
                elif kind == "Z":
                    return


class _Client(_End):
    def __init__(self, sock: socket.socket, number: int) -> None:
        super().__init__(sock)
        self.number = number
        self.login: tuple[str, str] | None = None
        self.key = struct.pack(">II", number, random.getrandbits(32))
        self.waiting: deque[tuple[str, bytes]] = deque()
        """Messages that no server connection has taken yet."""
        self.server: _Server | None = None
        self.last: _Server | None = None
        self.asked = 0
        """Requests whose ReadyForQuery is due."""
        self.unsynced = False
        """Messages of the extended protocol were sent, and no Sync."""


class Pooler(Loop):
    """Listens on ``port`` of 127.0.0.1; ``size`` connections to the server for each user and database."""

    def __init__(self, upstream: str | tuple[str, int], size: int = 3) -> None:
        super().__init__("pooler")
        assert size > 1, "with one connection nothing would ever change"
        self.upstream = upstream
        self.size = size
        self.taken = 0
        """How often a client got a server connection."""
        self.stayed = 0
        """How often it was that of its last transaction, as all others were busy."""
        self._clients: list[_Client] = []
        self._servers: list[_Server] = []
        self._queue: deque[_Client] = deque()
        self._numbers = 0
        self._listener = listening()
        self.port: int = self._listener.getsockname()[1]
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    # -- the loop

    def _wanted(self) -> tuple[dict[int, int], float | None]:
        wanted = {self._listener.fileno(): select.POLLIN}
        for end in (*self._clients, *self._servers):
            wanted[end.sock.fileno()] = select.POLLIN | (select.POLLOUT if end.out else 0)
        return wanted, None

    def _serve(self, ready: dict[int, int]) -> None:
        # By descriptor, before any is closed and its number used again.
        for end in [end for end in (*self._servers, *self._clients) if ready.get(end.sock.fileno())]:
            if end.closed:
                continue
            end.flush()
            data = end.pull()
            if isinstance(end, _Client):
                self._from_client(end, data)
            else:
                assert isinstance(end, _Server)
                self._from_server(end, data)
        if ready.get(self._listener.fileno()):
            self._accept()
        self._assign()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._numbers += 1
            self._clients.append(_Client(sock, self._numbers))

    def _end(self) -> None:
        self._listener.close()
        for end in (*self._clients, *self._servers):
            end.close()
        self._clients.clear()
        self._servers.clear()

    # -- clients

    def _from_client(self, client: _Client, data: bytes | None) -> None:
        if data is None:
            self._leave(client)
            return
        for kind, message in client.pair.feed("up", data):
            if client.closed:
                return
            if kind in {"ssl", "gss"}:
                client.put(b"N")
            elif kind == "startup":
                self._login(client, message)
            elif kind == "cancel":
                self._cancel(message[8:])
                self._leave(client)
            elif kind == "X":
                self._leave(client)
            elif client.server is not None:
                self._ask(client, client.server, kind, message)
            else:
                client.waiting.append((kind, message))
                if client not in self._queue:
                    self._queue.append(client)

    def _login(self, client: _Client, message: bytes) -> None:
        words = strings(message[8:])
        given = dict(zip(words[::2], words[1::2], strict=False))
        given.pop("", None)
        login = (given.pop("user"), given.pop("database", ""))
        client.login = (login[0], login[1] or login[0])
        for name in given:
            if name.lower() not in FOLLOWS:
                self._refuse(client, error("08P01", f"unsupported startup parameter: {name}"))
                return
        try:
            model = self._any_server(client.login)
        except PoolerError as refused:
            self._refuse(client, refused.message)
            return
        client.settings = model.settings | {FOLLOWS[name.lower()]: value for name, value in given.items()}
        shown = b"".join(postgres_message("S", f"{k}\0{v}\0".encode()) for k, v in client.settings.items())
        ready = postgres_message("Z", b"I")
        client.put(postgres_message("R", struct.pack(">I", 0)) + shown + postgres_message("K", client.key) + ready)

    def _refuse(self, client: _Client, message: bytes) -> None:
        client.put(message)
        self._leave(client)

    def _leave(self, client: _Client) -> None:
        """A client is gone: a transaction that it left open ends with its server connection, as nobody else may go on in it."""
        if client in self._queue:
            self._queue.remove(client)
        if client.server is not None:
            self._drop(client.server)
        client.close()
        if client in self._clients:
            self._clients.remove(client)

    def _cancel(self, key: bytes) -> None:
        for client in self._clients:
            if client.key == key and client.server is not None:
                with contextlib.suppress(OSError), connected(self.upstream) as sock:
                    sock.send(struct.pack(">II", 8 + len(client.server.key), CANCEL) + client.server.key)
                    select.select([sock], [], [], 5)  # the server closes when it has done so

    # -- server connections

    def _any_server(self, login: tuple[str, str]) -> _Server:
        for server in self._servers:
            if server.login == login:
                return server
        return self._open(login)

    def _open(self, login: tuple[str, str]) -> _Server:
        self._numbers += 1
        try:
            server = _Server(self.upstream, login, self._numbers)
        except OSError as down:
            raise PoolerError(error("08P01", f"cannot connect to the server: {down.strerror}")) from down
        self._servers.append(server)
        return server

    def _drop(self, server: _Server) -> None:
        if server.client is not None:
            server.client.server = None
            server.client = None
        if server in self._servers:
            self._servers.remove(server)
        if not server.closed:
            # A server in the middle of a statement looks at its socket only when it has an answer.
            server.closed = True
            close_with_reset(server.sock)

    def _assign(self) -> None:
        """Give server connections to the clients that wait, first come, first served."""
        for client in list(self._queue):
            try:
                server = self._pick(client)
            except PoolerError as refused:
                self._refuse(client, refused.message)
                continue
            if server is None:
                continue
            self._queue.remove(client)
            self.taken += 1
            self.stayed += server is client.last
            client.server = client.last = server
            server.client = client
            # The one that was used is the last to be used again.
            self._servers.remove(server)
            self._servers.append(server)
            self._align(client, server)
            while client.waiting:
                self._ask(client, server, *client.waiting.popleft())

    def _pick(self, client: _Client) -> _Server | None:
        assert client.login is not None
        mine = [server for server in self._servers if server.login == client.login]
        free = [server for server in mine if server.client is None and not server.swallow]
        if len(mine) < self.size:
            return self._open(client.login)  # all there may be, so that there is always another
        return next((server for server in free if server is not client.last), next(iter(free), None))

    def _align(self, client: _Client, server: _Server) -> None:
        names = [name for name in FOLLOWS.values() if client.settings.get(name) != server.settings.get(name)]
        if names:
            sets = ";".join(f"SET {name}='{_quoted(client.settings[name])}'" for name in names)
            server.put(postgres_message("Q", sets.encode() + b"\0"))
            server.swallow += 1

    def _ask(self, client: _Client, server: _Server, kind: str, message: bytes) -> None:
        ends = client.pair.ends_request(kind)
        client.asked += ends
        client.unsynced = not ends
        server.put(message)

    def _from_server(self, server: _Server, data: bytes | None) -> None:
        client = server.client
        for kind, message in server.pair.feed("down", data or b""):
            if kind == "S":
                server.note_setting(message)
            if server.swallow:
                # A setting that the server refuses is the client's to hear of; pgbouncer gives it up then, too.
                server.swallow -= kind == "Z"
                if kind == "E" and client is not None:
                    self._refuse(client, message)
                    return
                continue
            if client is None:
                continue  # a notice, or the reason why an idle connection ends
            if kind == "S":
                client.note_setting(message)
            client.put(message)
            if kind == "Z":
                client.asked -= 1
                if message[5:] == b"I" and not client.asked and not client.unsynced:
                    client.server = server.client = None
                    client = None
        if data is None:
            self._drop(server)
            if client is not None:
                self._refuse(client, error("08P01", "server conn crashed?"))


def _quoted(value: str) -> str:
    return value.replace("'", "''")
