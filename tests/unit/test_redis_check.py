"""What ``check`` says of Redis servers: real ones, set up badly in every way that it has a word for."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from safepoint.errors import Unavailable
from safepoint.model import Finding
from safepoint.stores.redis.check import Node, Refused, check
from safepoint.stores.url import open_store
from tests.support.servers import Redis, fresh_redis_url, shared_cluster, shared_redis

GOOD = ("--appendonly", "yes", "--appendfsync", "always")


class Asked:
    """A server that is asked over a connection of its own; what a test puts in its place is answered instead."""

    def __init__(self, url: str, **instead: Any) -> None:
        self.connection = redis.from_url(url).connection_pool.get_connection()
        self.instead = instead

    def __call__(self, *command: str) -> Any:
        if command[0] in self.instead:
            return self.instead[command[0]](*command)
        try:
            self.connection.send_command(*command)
            return self.connection.read_response()
        except redis.ResponseError as error:
            raise Refused(str(error)) from None

    def close(self) -> None:
        self.connection.disconnect()


Look = Callable[..., dict[str, Finding]]


@pytest.fixture
def look() -> Iterator[Look]:
    """``look(server, full=…, INFO=…)``: the findings by name; a name in capitals is answered instead of the server."""
    made: list[Asked] = []

    def findings(server: Redis, *, full: bool = True, wait_replicas: int = 0, cluster: bool = False, **instead: Any) -> Any:
        made.append(Asked(server.url, **instead))
        found = check([Node("", made[-1])], lambda: None, full=full, wait_replicas=wait_replicas, cluster=cluster)
        assert all(f.remedy for f in found if f.level != "ok"), "a finding without a remedy"
        by_name = {f.name: f for f in found}
        assert len(by_name) == len(found)
        return by_name

    yield findings
    for asked in made:
        asked.close()


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Callable[..., Redis]:
    def started(*options: str, **more: Any) -> Redis:
        server = Redis(*options, **more)
        request.addfinalizer(server.close)
        return server

    return started


def of_level(found: dict[str, Finding], level: str) -> set[str]:
    return {name for name, finding in found.items() if finding.level == level}


def set_up(server: Redis, **config: str) -> None:
    with redis.from_url(server.url) as client:
        for name, value in config.items():
            client.config_set(name.replace("_", "-"), value)


def instead_of_info(server: Redis, **changes: str) -> Callable[..., bytes]:
    asked = Asked(server.url)
    text = bytes(asked("INFO")).decode()
    asked.close()
    lines = [line for line in text.splitlines() if line.partition(":")[0] not in changes]
    return lambda *_: "\r\n".join([*lines, *(f"{name}:{value}" for name, value in changes.items() if value)]).encode()


def test_a_server_that_is_fit(look: Look) -> None:
    found = look(shared_redis())
    assert set(found) == {"write", "server", "role", "eviction", "persistence", "memory", "replicas", "clock"}
    assert of_level(found, "ok") == set(found), found


def test_eviction_persistence_and_memory(start: Callable[..., Redis], look: Look) -> None:
    server = start()
    assert of_level(look(server), "error") == {"persistence"}
    assert "all is gone" in look(server)["persistence"].text

    set_up(server, save="3600 1")
    assert of_level(look(server), "warning") == {"persistence"}
    assert "snapshots only" in look(server)["persistence"].text

    set_up(server, appendonly="yes", appendfsync="everysec")
    assert "the last second" in look(server)["persistence"].text
    assert of_level(look(server), "warning") == {"persistence"}
    assert look(server, full=False)["persistence"].level == "ok"
    set_up(server, appendfsync="no")
    assert "what the system has not written yet" in look(server)["persistence"].text
    set_up(server, appendfsync="always")
    assert of_level(look(server), "ok") == set(look(server))

    set_up(server, maxmemory_policy="allkeys-lru")
    assert look(server)["eviction"].level == "warning", "nothing is evicted as long as there is no limit"
    set_up(server, maxmemory="100mb")
    assert (found := look(server)["eviction"]).level == "error"
    assert "allkeys-lru" in found.text
    set_up(server, maxmemory_policy="noeviction")
    assert look(server)["memory"].level == "ok"
    with redis.from_url(server.url) as client:
        for i in range(200):
            client.set(f"much {i}", bytes(100_000))
        used = int(client.info("memory")["used_memory"])
    set_up(server, maxmemory=str(used + used // 20))
    assert (found := look(server)["memory"]).level == "warning"
    assert "MB used of" in found.text


def test_where_config_is_not_permitted_it_is_said_what_could_not_be_looked_at(start: Callable[..., Redis], look: Look) -> None:
    server = start("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-config")
    found = look(server)
    assert (found["config"].level, found["eviction"].level) == ("warning", "error")
    assert "as far as can be seen" in found["persistence"].text
    fit = start(*GOOD)
    with redis.from_url(fit.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-config")
    assert of_level(look(fit), "warning") == {"config", "persistence"}
    assert "not known" in look(fit)["persistence"].text


def test_replicas_and_what_a_failover_loses(start: Callable[..., Redis], look: Look) -> None:
    primary = start(*GOOD, "--repl-diskless-sync-delay", "0", tcp=True)
    assert (found := look(primary, wait_replicas=1)["replicas"]).level == "error"
    assert "no save can be acknowledged" in found.text
    replica = start(*GOOD, "--replicaof", f"127.0.0.1 {primary.port}", tcp=True)
    end = time.monotonic() + 30
    while look(primary)["replicas"].text.startswith("0") and time.monotonic() < end:
        time.sleep(0.1)
    assert (found := look(primary)["replicas"]).level == "warning"
    assert "a failover loses" in found.text
    assert look(primary, wait_replicas=1)["replicas"].level == "ok"
    assert look(primary, wait_replicas=2)["replicas"].level == "error"
    # Seen from the replica.
    found_there = look(replica)
    assert of_level(found_there, "error") == {"role"}
    assert str(primary.port) in found_there["role"].text


def test_a_cluster_and_a_server_that_is_none(look: Look) -> None:
    node = shared_cluster().nodes[0]
    assert look(node, cluster=True)["cluster"].level == "ok"
    assert "cluster=true" in look(node)["cluster"].remedy
    assert look(shared_redis(), cluster=True)["cluster"].level == "error"
    state = b"cluster_state:fail\r\ncluster_slots_ok:10923\r\n"
    found = look(node, cluster=True, CLUSTER=lambda *_: state)["cluster"]
    assert found.level == "error"
    assert "10923 of 16384" in found.text


@pytest.mark.parametrize("skew", [-7.5, 0.0, 7.5])
def test_a_clock_that_differs(skew: float, look: Look) -> None:
    # Of a server on this host it cannot differ: this one's answer is moved.
    def time_there(*_: str) -> tuple[int, int]:
        seconds, micros = divmod(int((time.time() + skew) * 1e6), 1_000_000)
        return seconds, micros

    found = look(shared_redis(), TIME=time_there)["clock"]
    assert found.level == ("warning" if skew else "ok")
    assert not skew or f"7.5 s {'ahead of' if skew > 0 else 'behind'}" in found.text


def test_a_slow_answer_is_no_skew(look: Look) -> None:
    def slow(*_: str) -> tuple[int, int]:
        moment = time.time()
        time.sleep(0.3)
        return int(moment), int(moment % 1 * 1e6)

    assert look(shared_redis(), TIME=slow)["clock"].level == "ok"


def test_versions(look: Look) -> None:
    server = shared_redis()
    assert "Valkey" in look(server)["server"].text or "Redis" in look(server)["server"].text
    for version, level in (("6.0.16", "error"), ("5.0", "error"), ("6.2.0", "ok"), ("8.0.1", "ok"), ("strange", "warning")):
        info = instead_of_info(server, redis_version=version, valkey_version="")
        found = look(server, INFO=info)["server"]
        assert found.level == level, version
        assert version in found.text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"aof_last_write_status": "err"}, "persistence"),
        ({"total_system_memory": "1000000"}, "memory"),
    ],
)
def test_what_the_server_itself_says_is_wrong(changes: dict[str, str], name: str, look: Look) -> None:
    server = shared_redis()
    found = look(server, INFO=instead_of_info(server, **changes))[name]
    assert found.level != "ok"


def test_a_node_that_does_not_answer_is_a_finding(look: Look) -> None:
    def silent(*_: str) -> None:
        raise Unavailable("nobody answers", "", "Start it.")

    found = look(shared_redis(), INFO=silent)
    assert of_level(found, "error") == {"server"}


def test_a_write_that_fails_is_a_finding() -> None:
    def fails() -> None:
        raise Unavailable("no answer", "the server is full", "Free memory.")

    (found,) = check([], fails, full=True)
    assert (found.name, found.level, found.remedy) == ("write", "error", "Free memory.")

    def refused() -> None:
        raise Refused("READONLY You can't write against a read only replica.")

    (found,) = check([], refused, full=True)
    assert "READONLY" in found.text


# -- through the store


def store_findings(url: str, **options: Any) -> dict[str, list[Finding]]:
    with contextlib.closing(open_store(url, **options)) as store:
        found: dict[str, list[Finding]] = {}
        for finding in store.check():
            found.setdefault(finding.name, []).append(finding)
    return found


def test_a_check_writes_and_reads_and_leaves_no_trace() -> None:
    with redis.from_url(shared_redis().url) as client:
        before = sorted(client.scan_iter())
        client.config_resetstat()
        found = store_findings(fresh_redis_url())
        assert [f.level for f in found["write"]] == ["ok"]
        assert client.info("commandstats")["cmdstat_hset"]["calls"] == 1
        assert sorted(client.scan_iter()) == before


def test_every_node_of_a_cluster_is_looked_at() -> None:
    cluster = shared_cluster()
    found = store_findings(f"{cluster.url}?cluster=true", durability="process")
    assert [f.level for f in found["write"]] == ["ok"]
    assert {f.text.partition(": ")[0] for f in found["cluster"]} == {f"127.0.0.1:{port}" for port in cluster.ports}
    assert {f.level for f in found["cluster"]} == {"ok"}
    assert len(found["persistence"]) == len(cluster.ports)


def test_a_replica_and_a_server_that_is_gone(start: Callable[..., Redis]) -> None:
    primary = start(*GOOD, "--repl-diskless-sync-delay", "0", tcp=True)
    replica = start(*GOOD, "--replicaof", f"127.0.0.1 {primary.port}", tcp=True)
    end = time.monotonic() + 30
    while True:
        found = store_findings(replica.safepoint_url, timeout=0.5)
        if "READONLY" in found["write"][0].text or time.monotonic() > end:
            break
    assert [f.level for f in (*found["write"], *found["role"])] == ["error"] * 2
    assert "read only replica" in found["write"][0].text
    primary.stop()
    found = store_findings(primary.safepoint_url, timeout=0.5)
    assert {name: [f.level for f in of] for name, of in found.items()} == {"write": ["error"], "server": ["error"]}


def test_no_password_in_what_is_found(start: Callable[..., Redis]) -> None:
    server = start(tcp=True)
    set_up(server, requirepass="sesame")
    for word in ("sesame", "wrong-sesame"):
        found = store_findings(f"redis://:{word}@127.0.0.1:{server.port}/0", timeout=0.5)
        assert ("ok" in [f.level for f in found["write"]]) is (word == "sesame")
        assert "sesame" not in repr(found)


def test_the_package_needs_redis_only_when_it_is_opened() -> None:
    code = "import sys, safepoint, safepoint.stores.url; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
