"""How a PostgreSQL store comes to be: its schema, its URL, and what is said where it cannot."""

import subprocess
import sys
import time
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from safepoint.errors import (
    Damaged,
    NewerFormat,
    SafepointError,
    Unavailable,
    UsageError,
)
from safepoint.stores.postgres import schema as schemas
from safepoint.stores.postgres.store import PostgresStore
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, tree
from tests.support.servers import fresh_postgres_url


@pytest.fixture
def url():
    return fresh_postgres_url()


@pytest.fixture
def store(url):
    store = open_store(url, timeout=5)
    yield store
    store.close()


@pytest.fixture
def side(postgres):
    """A connection beside the store."""
    with psycopg.connect(postgres.url, autocommit=True) as conn:
        yield conn


def schema_of(url):
    return url.rpartition("schema=")[2]


# -- the schema


_OPENER = """
import sys
from safepoint.stores.postgres.store import PostgresStore
store = PostgresStore(sys.argv[1], schema=sys.argv[2], timeout=60)
print("ready", flush=True)
sys.stdin.readline()
store.release(sys.argv[3], store.acquire(sys.argv[3], b"me"))
store.close()
print("done", flush=True)
"""


def test_ten_processes_at_once_set_up_one_schema(url):
    plain, _, name = url.rpartition("&schema=")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", _OPENER, plain, name, f"t{i}"], **pipes) for i in range(10)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("now\n")
        child.stdin.flush()
    assert [child.communicate(timeout=90) for child in children] == [("done\n", "")] * 10
    store = open_store(url)
    assert [row.attempts for row in store.tasks()] == [1] * 10
    store.close()


def test_a_newer_schema_is_left_alone(url, side):
    store = open_store(url)
    Writer(store).save()
    store.close()
    name = schema_of(url)
    side.execute(f"UPDATE {name}.sp_meta SET value = '{schemas.SCHEMA + 1}' WHERE key = 'schema'")
    side.execute(f"ALTER TABLE {name}.sp_tasks RENAME COLUMN status TO state")
    before = side.execute(f"SELECT * FROM {name}.sp_meta ORDER BY key").fetchall()
    again = open_store(url)
    with pytest.raises(NewerFormat, match=f"version {schemas.SCHEMA + 1}"):
        again.task("task")
    with pytest.raises(NewerFormat):
        Writer(again).save()
    again.close()
    assert side.execute(f"SELECT * FROM {name}.sp_meta ORDER BY key").fetchall() == before


def test_a_schema_that_was_never_released_is_left_alone(url, side):
    """Its functions have the names of today's, and read the arrays of a commit otherwise: what they are given lands elsewhere."""
    store = open_store(url)
    Writer(store).save()
    store.close()
    name = schema_of(url)
    side.execute(f"UPDATE {name}.sp_meta SET value = '1' WHERE key = 'schema'")
    before = side.execute(f"SELECT * FROM {name}.sp_meta ORDER BY key").fetchall()
    again = open_store(url)
    assert any("never released" in finding.text and finding.level != "ok" for finding in again.check())
    for verb in (lambda: again.task("task"), lambda: Writer(again).save()):
        with pytest.raises(UsageError, match="never released") as caught:
            verb()
        assert "Export" in caught.value.remedy
        assert "nothing was changed" in caught.value.remedy
    again.close()
    assert side.execute(f"SELECT * FROM {name}.sp_meta ORDER BY key").fetchall() == before


def test_an_older_schema_is_brought_up_to_date_and_keeps_nobody_waiting_for_long(url, side, store, monkeypatch):
    Writer(store).save(*tree("a"))
    text = schemas.text
    with monkeypatch.context() as newer:
        newer.setattr(schemas, "STEPS", (*schemas.STEPS, "next"))
        newer.setattr(schemas, "SCHEMA", schemas.SCHEMA + 1)
        newer.setattr(
            schemas, "text", lambda name: "ALTER TABLE {s}.sp_tasks ADD COLUMN extra text" if name == "next" else text(name)
        )
        with psycopg.connect(url.partition("&schema")[0]) as busy:
            busy.execute(f"SELECT FROM {schema_of(url)}.sp_tasks")
            quick = open_store(url, timeout=0.6)
            with pytest.raises(Unavailable):
                quick.tasks()
            quick.close()
            # Nor is there a server's process left that waits, and has all others wait behind it.
            asked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            end = time.monotonic() + 5
            while side.execute(asked).fetchall() != [(0,)]:
                assert time.monotonic() < end
            assert store.task("task") is not None
        new = open_store(url)
        assert [row.task for row in new.tasks()] == ["task"]
        found = new.read("task")
        assert found is not None
        assert len(found[1]) == 3
        new.close()
    assert side.execute(f"SELECT extra FROM {schema_of(url)}.sp_tasks").fetchall() == [(None,)]
    assert store.task("task") is not None  # is open, and goes on
    old = open_store(url)
    with pytest.raises(NewerFormat):
        old.tasks()
    old.close()


def test_functions_that_are_missing_are_added_and_newer_ones_are_no_hindrance(url, side, store):
    Writer(store).save()
    name = schema_of(url)
    for functions, last in ((0, True), (99, False)):
        side.execute(f"UPDATE {name}.sp_meta SET value = '{functions}' WHERE key = 'functions'")
        if last:
            for (signature,) in side.execute(
                "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE pronamespace = %s::regnamespace", (name,)
            ).fetchall():
                side.execute(f"DROP FUNCTION {signature}")
        other = open_store(url)
        assert Writer(other, f"with-{functions}").save().seq == 1
        other.close()
        found = side.execute(f"SELECT value FROM {name}.sp_meta WHERE key = 'functions'").fetchall()
        assert found == [(str(len(schemas.FUNCTIONS) if last else functions),)]


def test_who_may_not_create_can_use_what_is_set_up(url, side, postgres):
    name = schema_of(url)
    role = f"r_{name}"
    side.execute(f"CREATE ROLE {role} LOGIN")
    side.execute("REVOKE CREATE ON SCHEMA public FROM public")
    theirs = url.replace("postgres@", f"{role}@")
    try:
        store = open_store(theirs)
        with pytest.raises(UsageError, match="may not set up schema") as caught:
            store.tasks()
        assert "GRANT" in caught.value.remedy
        store.close()
        Writer(store := open_store(url)).save(*tree("a"))
        store.close()
        store = open_store(theirs)
        with pytest.raises(UsageError, match="GRANT"):
            store.tasks()
        side.execute(f"GRANT USAGE ON SCHEMA {name} TO {role}")
        for what in ("TABLES", "SEQUENCES", "FUNCTIONS"):
            side.execute(f"GRANT ALL ON ALL {what} IN SCHEMA {name} TO {role}")
        grant = store.acquire("task", b"me")
        writer = Writer(store, guard=grant.guard, head=store.task("task").head)
        writer.save(*tree("b"))
        writer.settle(writer.call())
        Writer(store, "new").save()
        found = store.read("task")
        assert found is not None
        assert len(found[1]) == 3
        store.prune("task", [1])
        store.release("task", grant)
        store.close()
    finally:
        side.execute(f"DROP OWNED BY {role}")
        side.execute(f"DROP ROLE {role}")


def test_a_schema_may_have_any_name(url, side):
    name = 'Ein "Schema" {x} $ \\ ; -- \N{SNOWMAN}'
    plain = url.rpartition("&schema=")[0]
    try:
        store = open_store(plain, schema=name)
        writer = Writer(store)
        writer.save(*tree("a"))
        writer.settle(writer.call())
        found = store.read("task")
        assert found is not None
        assert len(found[1]) == 3
        assert len(store.headers("task")) == 1
        store.release("task", store.acquire("task", b"me"))
        store.close()
        assert side.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,)).fetchall() == [(1,)]
    finally:
        side.execute(psycopg.sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(psycopg.sql.Identifier(name)))


@pytest.mark.parametrize("name", ["", "a%b", "a\0", "x" * 64, "\N{SNOWMAN}" * 22, "it's", "a$$; DROP SCHEMA public; --"])
def test_a_name_that_no_schema_can_have_is_refused(postgres, name):
    with pytest.raises(UsageError):
        PostgresStore(postgres.url, schema=name)


def test_a_schema_that_is_dropped_under_a_store_is_damage_and_not_an_empty_store(url, side, store):
    Writer(store).save()
    side.execute(f"DROP SCHEMA {schema_of(url)} CASCADE")
    with pytest.raises(Damaged, match="not whole"):
        store.tasks()
    with pytest.raises(Damaged, match="not whole"):
        Writer(store, "other").save()


# -- URLs


def test_an_option_that_nobody_knows_is_refused_by_name(postgres):
    with pytest.raises(UsageError, match="sslmodus") as caught:
        open_store(f"{postgres.url}&sslmodus=disable")
    assert "libpq" in str(caught.value)
    with pytest.raises(UsageError):
        open_store(f"{postgres.url}&connect_timeout=soon").tasks()


def test_no_password_is_shown(postgres):
    secret = "hush%40hush"
    host = quote(str(postgres.folder), safe="")
    for url in (
        f"postgresql://nobody:{secret}@/postgres?host={host}",
        f"postgresql://nobody@/postgres?host={host}&password={secret}",
        f"postgresql://nobody:{secret}@/postgres?host={host}&passwort={secret}",
        f"postgresql://nobody:{secret}@127.0.0.1:1/x",
        f"postgresql://nobody:{secret}@[::1/x",
    ):
        store = None
        shown = []
        try:
            store = open_store(url, timeout=0.2)
            shown += [store.url, repr(store)]
            store.tasks()
        except SafepointError as error:
            shown += [str(error), repr(error), repr(error.details), repr(error.__cause__)]
        assert shown
        assert not [text for text in shown if "hush" in text], url
        if store is not None:
            store.close()


def test_a_timeout_may_be_as_long_as_one_likes(url):
    store = open_store(url, timeout=1e9, lease=1e9)
    grant = store.acquire("task", b"me")
    Writer(store, guard=grant.guard).save()
    store.prune("task", [1])
    store.release("task", grant)
    store.close()
    for option in ("timeout", "lease"):
        with pytest.raises(UsageError, match="billion"):
            open_store(url, **{option: 1e10})


def test_a_login_that_is_refused_is_said_at_once(url):
    for wrong in (url.replace("postgres@", "nobody_here@"), url.replace("@/postgres", "@/no_such_database")):
        store = open_store(wrong, timeout=20)
        start = time.monotonic()
        with pytest.raises(UsageError, match="refuses the login") as caught:
            store.tasks()
        assert time.monotonic() - start < 10
        assert "does not exist" in caught.value.why
        store.close()


def test_what_is_libpqs_in_a_url_comes_to_it_as_it_is_written(postgres):
    url = f"{postgres.url}&schema=s%20t&timeout=3&application_name=a%2Bb+c%26d&%74imeout=3"
    with pytest.raises(UsageError, match="twice"):
        open_store(url)
    store = PostgresStore(url.partition("&%74")[0], schema="x")
    assert psycopg.conninfo.conninfo_to_dict(store._db._info) == {
        "host": str(postgres.folder),
        "user": "postgres",
        "dbname": "postgres",
        "application_name": "a+b+c&d",
    }
    store.close()
