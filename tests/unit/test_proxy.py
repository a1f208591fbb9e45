"""The proxy that lets the network fail at a named point: each fault, at each point, as a client and a server see it."""

import contextlib
import socket
import struct
import threading
import time

import psycopg
import pytest
import redis

from tests.support.proxy import PARTS, Proxy
from tests.support.wire import PostgresPair, RespPair


class Echo:
    """Answers each line with itself, in capitals; notes the lines, and how a connection ended."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.lines = []
        self.ends = []
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self.serve, args=(sock,)))
            self.threads[-1].start()

    def serve(self, sock):
        with sock:
            rest = b""
            try:
                while data := sock.recv(4096):
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self.lines.append(line)
                        sock.sendall(line.upper() + b"\n")
                self.ends.append(rest)
            except OSError as error:
                self.ends.append(type(error))

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def echo():
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def proxy(echo):
    with Proxy(echo.address) as made:
        yield made


class Client:
    def __init__(self, proxy):
        self.sock = socket.create_connection(("127.0.0.1", proxy.port), timeout=5)

    def ask(self, line):
        self.sock.sendall(line + b"\n")
        return self.hear()

    def hear(self):
        try:
            return self.sock.recv(4096)
        except ConnectionResetError:
            return "reset"
        except TimeoutError:
            return "nothing"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()


def ended(echo):
    end = time.monotonic() + 5
    while not echo.ends:
        assert time.monotonic() < end
        time.sleep(0.002)
    return echo.ends[-1]


def test_it_passes_and_counts(proxy, echo):
    with Client(proxy) as one, Client(proxy) as two:
        assert one.ask(b"a") == b"A\n"
        assert two.ask(b"b") == b"B\n"
        assert one.ask(b"c") == b"C\n"
    assert proxy.seen == {"up": 3, "down": 3}
    assert [(m.direction, m.number, m.data, m.connection) for m in proxy.messages[:4]] == [
        ("up", 1, b"a\n", 1), ("down", 1, b"A\n", 1), ("up", 2, b"b\n", 2), ("down", 2, b"B\n", 2),
    ]  # fmt: skip
    assert proxy.opened == 2
    proxy.rewind()
    assert proxy.seen == {"up": 0, "down": 0}


def test_much_passes_unchanged(proxy, echo):
    line = bytes(range(11, 256)) * 8_000
    with Client(proxy) as client:
        sender = threading.Thread(target=client.sock.sendall, args=(line + b"\n",))
        sender.start()
        got = bytearray()
        while len(got) <= len(line):
            got += client.sock.recv(1 << 16)
        sender.join()
    assert got == line.upper() + b"\n"


def test_the_end_of_one_direction_is_handed_on(proxy, echo):
    with Client(proxy) as client:
        client.sock.sendall(b"a\nrest")
        client.sock.shutdown(socket.SHUT_WR)
        assert client.hear() == b"A\n"
        assert client.hear() == b""
    assert ended(echo) == b"rest"


# What the client hears at the second line, and which lines the server has seen; None where the race decides.
CUT = {
    ("up", "before"): (b"", [b"a"], b""),
    ("up", "inside"): (b"", [b"a"], b"bb"),
    ("up", "after"): (b"", None, None),
    ("up", "answer"): (b"", [b"a", b"bbb"], b""),
    ("down", "before"): (b"", [b"a", b"bbb"], b""),
    ("down", "inside"): (b"BB", [b"a", b"bbb"], b""),
    ("down", "after"): (b"BBB\n", [b"a", b"bbb"], b""),
}


@pytest.mark.parametrize("action", ["cut", "reset"])
@pytest.mark.parametrize(("direction", "part"), CUT)
def test_a_connection_breaks_at_a_point(proxy, echo, action, direction, part):
    heard, lines, rest = CUT[direction, part]
    with Client(proxy) as client:
        proxy.arm(action, direction, 2, part)
        assert client.ask(b"a") == b"A\n"
        assert proxy.fired is None
        got = client.ask(b"bbb")
        assert proxy.wait_fired().number == 2
        end = "reset" if action == "reset" else b""
        # After a reset, what has arrived and was not read is gone.
        assert got == (heard or end) or (heard and action == "reset" and got == end)
        assert client.hear() in {end, b""}
    if action == "cut":
        how = ended(echo)
        if lines is not None:
            assert echo.lines == lines
            # An answer that comes where nobody reads is answered by a reset.
            assert how in {rest, ConnectionResetError}
    elif lines is not None:
        assert ended(echo) is ConnectionResetError
    with Client(proxy) as again:
        assert again.ask(b"c") == b"C\n"


def test_half_a_connection(proxy, echo):
    with Client(proxy) as client:
        proxy.arm("half", "down", 1)
        assert client.ask(b"a") == b""
        client.sock.sendall(b"b\n")
        client.sock.shutdown(socket.SHUT_WR)
        assert ended(echo) == b""
    assert echo.lines == [b"a", b"b"]

    proxy.rewind()
    with Client(proxy) as client:
        proxy.arm("half", "up", 2, "after")
        assert client.ask(b"c") == b"C\n"
        assert client.ask(b"d") == b"D\n"
        assert client.hear() == b""
    assert echo.lines[2:] == [b"c", b"d"]


@pytest.mark.parametrize("part", PARTS)
def test_a_delay(proxy, echo, part):
    with Client(proxy) as client:
        proxy.arm("delay", "up", 1, part, seconds=0.3)
        began = time.monotonic()
        answers = client.ask(b"aa") + client.ask(b"b")
        assert answers == b"AA\nB\n"
        assert time.monotonic() - began >= 0.3
        assert echo.lines == [b"aa", b"b"]


@pytest.mark.parametrize("part", PARTS)
def test_what_is_held_is_delivered_when_the_network_heals(proxy, echo, part):
    with Client(proxy) as client, Client(proxy) as other:
        proxy.arm("hold", "up", 1, part)
        client.sock.settimeout(0.1)
        assert client.ask(b"aa") == "nothing"
        proxy.wait_fired()
        other.sock.settimeout(0.1)
        assert other.ask(b"b") == "nothing"
        if part in {"after", "answer"}:
            # It was handed on; when the server's thread comes to it is the machine's affair.
            end = time.monotonic() + 5
            while not echo.lines and time.monotonic() < end:
                time.sleep(0.002)
            assert echo.lines == [b"aa"]
        else:
            assert echo.lines == []
        with Client(proxy) as late:
            late.sock.settimeout(0.1)
            assert late.ask(b"c") == "nothing"
            proxy.heal()
            for waiting, answer in ((client, b"AA\n"), (other, b"B\n"), (late, b"C\n")):
                waiting.sock.settimeout(5)
                assert waiting.hear() == answer


def test_what_is_held_is_lost_by_a_cut(proxy, echo):
    with Client(proxy) as client:
        assert client.ask(b"a") == b"A\n"
        proxy.hold()
        client.sock.sendall(b"b\n")
        proxy.cut()
        proxy.heal()
        assert client.hear() in {b"", "reset"}
    assert echo.lines == [b"a"]
    with Client(proxy) as client:
        assert client.ask(b"c") == b"C\n"
        proxy.reset()
        assert client.hear() == "reset"


def test_connections_are_refused(proxy):
    with Client(proxy) as client:
        proxy.refuse()
        assert client.ask(b"a") == b"A\n"
        with pytest.raises(ConnectionRefusedError):
            Client(proxy)
        proxy.heal()
        proxy.arm("cut", "up", lambda m: m.data == b"b\n", outage=True)
        assert client.ask(b"b") == b""
    with pytest.raises(ConnectionRefusedError):
        Client(proxy)
    proxy.heal()
    with Client(proxy) as client:
        assert client.ask(b"a") == b"A\n"


def test_a_server_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    with Proxy(address) as proxy:
        with pytest.raises(ConnectionResetError), Client(proxy) as client:
            client.sock.recv(1)
        with socket.create_server(address) as opened, Client(proxy) as client:
            opened.accept()[0].close()
            assert client.hear() == b""


def test_a_condition_that_raises_is_told():
    with pytest.raises(RuntimeError, match="proxy has failed"), Proxy(("127.0.0.1", 1)) as proxy:
        proxy.do(lambda: 1 / 0)


# -- messages


def split(pair, direction, data, step):
    found = []
    for i in range(0, len(data), step):
        found += pair.feed(direction, data[i : i + step])
    return found


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_messages_of_postgres(step):
    pair = PostgresPair()
    ssl = struct.pack(">II", 8, 80877103)
    startup = struct.pack(">II", 8 + 4, 196608) + b"a\0b\0"
    assert split(pair, "up", ssl, step) == [("ssl", ssl)]
    assert split(pair, "down", b"N", step) == [("no", b"N")]
    query = b"Q\0\0\0\x06;\0"
    assert split(pair, "up", startup + query, step) == [("startup", startup), ("Q", query)]
    ready = b"Z\0\0\0\x05I"
    assert split(pair, "down", ready * 2 + ready[:3], step) == [("Z", ready)] * 2
    assert pair.rest["down"] == ready[:3]


REPLIES = [
    b"+OK\r\n", b"-ERR x\r\n", b":1\r\n", b"$-1\r\n", b"*-1\r\n", b"$4\r\n\r\n+a\r\n", b"*0\r\n", b"$0\r\n\r\n",
    b"*3\r\n$1\r\na\r\n*2\r\n:1\r\n+b\r\n_\r\n", b"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n#t\r\n", b"~1\r\n,1.5\r\n", b"(123\r\n",
    b"=7\r\ntxt:abc\r\n", b"!3\r\nERR\r\n", b">2\r\n+message\r\n+x\r\n", b"|1\r\n+ttl\r\n:5\r\n$1\r\nv\r\n",
]  # fmt: skip


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_messages_of_redis(step):
    pair = RespPair()
    assert split(pair, "down", b"".join(REPLIES), step) == [(chr(reply[0]), reply) for reply in REPLIES]
    commands = [b"*2\r\n$3\r\nget\r\n$2\r\n\r\n\r\n", b"PING\r\n", b"*1\r\n$4\r\nPING\r\n"]
    assert split(pair, "up", b"".join(commands), step) == list(zip(["GET", "PING", "PING"], commands, strict=True))
    assert not any(pair.rest.values())


# -- real servers


@pytest.fixture
def pg_proxy(postgres):
    with psycopg.connect(postgres.url) as conn:
        conn.execute("CREATE TABLE proxied (i int)")
    with Proxy(postgres.socket_path, "postgres") as proxy:
        yield proxy
    with psycopg.connect(postgres.url) as conn:
        conn.execute("DROP TABLE proxied")


def insert(url, i):
    """Returns the error, if any."""
    try:
        with psycopg.connect(url) as conn:
            conn.execute("INSERT INTO proxied VALUES (%s)", (i,))
    except psycopg.OperationalError as error:
        return error
    return None


def rows(postgres):
    with psycopg.connect(postgres.url) as conn:
        return [row[0] for row in conn.execute("SELECT i FROM proxied ORDER BY i")]


def settled(postgres):
    """Wait until no other session is there: the end of a cut one is not instant."""
    ask = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    with psycopg.connect(postgres.url, autocommit=True) as conn:
        while conn.execute(ask).fetchall()[0][0]:
            time.sleep(0.005)
    return rows(postgres)


def is_commit(message):
    return message.kind == "Q" and b"COMMIT" in message.data


def test_a_commit_and_its_answer(pg_proxy, postgres):
    url = pg_proxy.postgres_url
    pg_proxy.arm("cut", "up", is_commit, "before")
    assert insert(url, 1)
    assert settled(postgres) == []
    pg_proxy.arm("cut", "up", is_commit, "inside")
    assert insert(url, 2)
    assert settled(postgres) == []
    pg_proxy.arm("cut", "up", is_commit, "answer")
    assert insert(url, 3)
    assert settled(postgres) == [3]
    pg_proxy.arm("reset", "up", is_commit, "answer", outage=True)
    assert insert(url, 4)
    assert insert(url, 5), "refused"
    assert settled(postgres) == [3, 4]
    pg_proxy.heal()
    assert insert(url, 5) is None
    assert settled(postgres) == [3, 4, 5]


def three_at_once(conn):
    results = []
    with contextlib.suppress(psycopg.OperationalError), conn.pipeline() as pipeline:
        for i, word in enumerate(["first", "second", "third"]):
            results.append(conn.execute("INSERT INTO proxied SELECT %s WHERE %s <> ''", (i, word)))
            pipeline.sync()
    return results


def test_the_answer_in_a_pipeline_is_the_right_one(pg_proxy, postgres):
    """Three requests are under way at once; what fails is the answer to the second."""
    pg_proxy.arm("cut", "up", lambda m: m.kind == "B" and b"second" in m.data, "answer")
    with psycopg.connect(pg_proxy.postgres_url, autocommit=True) as conn:
        results = three_at_once(conn)
    assert results[0].rowcount == 1
    assert settled(postgres)[:2] == [0, 1]
    assert pg_proxy.fired.kind == "Z"


def test_every_message_of_a_life_with_postgres(pg_proxy, postgres):
    """At none of them a row is lost that was said to be committed, and each fault strikes."""
    assert insert(pg_proxy.postgres_url, 0) is None
    steps = [(m.direction, m.number) for m in pg_proxy.messages if m.kind != "X"]
    assert len(steps) > 10
    for n, (direction, number) in enumerate(steps, 1):
        pg_proxy.rewind()
        pg_proxy.arm("cut", direction, number)
        error = insert(pg_proxy.postgres_url, n)
        assert pg_proxy.fired is not None
        assert error is not None
    stored = settled(postgres)
    # The last two messages are what answers COMMIT: CommandComplete and ReadyForQuery.
    assert stored == [0, len(steps) - 1, len(steps)]


def test_a_command_and_its_answer(valkey):
    key = "proxied"
    with Proxy(valkey.socket_path, "resp") as proxy, redis.Redis.from_url(valkey.url) as direct:
        for part, done in (("before", 0), ("inside", 0), ("answer", 1)):
            for action in ("cut", "reset"):
                direct.delete(key)
                proxy.arm(action, "up", lambda m: m.kind == "INCRBY", part)
                no_retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
                with redis.Redis.from_url(proxy.redis_url, retry=no_retry) as client, pytest.raises(redis.ConnectionError):
                    client.incr(key)
                assert int(direct.get(key) or 0) == done
        direct.delete(key)
