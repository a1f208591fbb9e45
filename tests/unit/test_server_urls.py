"""URLs of servers that are not what was meant: told at once, as what they are, and with no part of a password."""

import time
from urllib.parse import urlsplit

import psycopg
import pytest
import redis

import safepoint
from safepoint import Conflict, State, UsageError
from safepoint.errors import SafepointError, Unavailable
from safepoint.stores.url import open_store
from tests.support.pooler import Pooler
from tests.support.servers import Redis, fresh_postgres_url, fresh_redis_url, shared_cluster, shared_postgres, shared_redis


def refused(url, kind=UsageError, within=8):
    """What the first request to a store says, which is told long before its timeout."""

    def asked():
        store = open_store(url, timeout=20)
        try:
            store.tasks()
        finally:
            store.close()

    start = time.monotonic()
    with pytest.raises(kind) as caught:
        asked()
    assert time.monotonic() - start < within
    error = caught.value
    assert isinstance(error, SafepointError)
    assert error.remedy
    return error


@pytest.mark.parametrize("login", ["me:hush@husher", "me:12/hush", "me:hush/husher", "me@here:hush"])
@pytest.mark.parametrize("scheme", ["postgresql", "redis"])
def test_a_password_that_is_not_escaped_is_not_taken_for_a_host(scheme, login):
    if (scheme, login.count("@")) == ("redis", 1):
        return  # there the last one counts, and all before it is a login that nobody has
    error = refused(f"{scheme}://{login}@127.0.0.1:1/1x")
    shown = f"{error!r} {error} {error.details} {error.__cause__!r}"
    assert "hush" not in shown
    assert "12" not in shown.replace("127.0.0.1", "")


def test_a_port_or_a_database_that_is_no_number_is_said_before_anybody_is_asked():
    assert "port" in refused("postgresql://me@127.0.0.1:none/x").why
    assert "port" in refused("postgresql://me@127.0.0.1/x?port=none").why
    server = shared_redis().url.rpartition("/")[0]
    assert "database" in refused(f"{server}/cache").why
    assert "database" in refused(f"{server}/9999").remedy


def test_a_single_server_is_no_cluster_and_a_node_is_no_single_server():
    assert "cluster=true" in refused(f"{fresh_redis_url()}&cluster=true").remedy
    node = f"{shared_cluster().url}?prefix=x:"
    assert "cluster=true" in refused(node).remedy


def test_what_keeps_a_cluster_from_being_found_is_said():
    server = Redis(tcp=True)
    try:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", "open")
        error = refused(f"redis://:hush@127.0.0.1:{server.port}?cluster=true")
        assert "password" in error.why
        assert "password" in error.remedy
    finally:
        server.close()
    store = open_store("redis://127.0.0.1:1?cluster=true", timeout=0.2)
    with pytest.raises(Unavailable, match="refused"):
        store.tasks()
    store.close()


def test_options_that_the_server_or_its_pooler_does_not_take_are_told_at_once():
    url = fresh_postgres_url()
    with Pooler(shared_postgres().socket_path) as pooler:
        error = refused(f"{pooler.url}?options=-cstatement_timeout%3D5s")
    assert "options" in error.why
    assert "options" in error.remedy
    # Over TCP only: on a socket TLS is not asked for.
    with Pooler(shared_postgres().socket_path) as pooler:
        assert "options" in refused(f"{pooler.url}?sslmode=require").remedy
    assert "sslmode" in refused(f"{url}&sslmode=perhaps").why


def test_what_is_to_be_granted_is_said_so_that_it_can_be_pasted():
    url = f'{fresh_postgres_url()} "its'
    schema = "role of the poor"
    theirs = url.replace("postgres@", f"{schema.replace(' ', '%20')}@", 1)
    with safepoint.open(url) as cp:
        cp.save(State("task"))
    with psycopg.connect(shared_postgres().url, autocommit=True) as admin:
        admin.execute(f'CREATE ROLE "{schema}" LOGIN')
        try:
            with safepoint.open(theirs) as cp:
                with pytest.raises(UsageError, match="GRANT USAGE ON SCHEMA"):
                    cp.tasks()
                found = {f.name: f for f in cp.check()}
                assert found["permissions"].level == "error"
                admin.execute(found["permissions"].remedy)
                assert {f.name: f for f in cp.check()}["permissions"].level == "ok"
                assert cp.copy_to("memory://").changed
                cp.update("task", lambda state: state.metadata.update(seen=True))
            sequences = admin.execute("SELECT c.oid::regclass::text FROM pg_class c WHERE relkind = 'S'").fetchall()
            for (name,) in sequences:
                if "sp_" in name and "its" in name:
                    admin.execute(f'REVOKE USAGE ON SEQUENCE {name} FROM "{schema}"')
            with safepoint.open(theirs) as cp:
                assert "_seq" in {f.name: f for f in cp.check()}["permissions"].text
        finally:
            admin.execute(f'DROP OWNED BY "{schema}"')
            admin.execute(f'DROP ROLE "{schema}"')
            name = urlsplit(url).query.rpartition("schema=")[2].replace('"', '""')
            admin.execute(f'DROP SCHEMA "{name}" CASCADE')


def test_a_copy_that_has_gone_on_is_not_called_one_to_be_deleted(tmp_path):
    with safepoint.open(f"sqlite:///{tmp_path}/old.db") as old, safepoint.open(fresh_postgres_url()) as new:
        old.save(State("task"))
        old.copy_to(new)
        new.update("task", lambda state: state.metadata.update(n=1))
        with pytest.raises(Conflict) as caught:
            old.copy_to(new)
        assert "gone on there" in caught.value.what
        assert "elete it there" not in caught.value.remedy
        new.delete_task("task")
        new.save(State("task", metadata={"another": True}))
        with pytest.raises(Conflict, match="another one"):
            old.copy_to(new)
