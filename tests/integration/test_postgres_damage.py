"""PostgreSQL's own files damaged: what can be read is read, what cannot is named, and repair keeps the rest.

The server is stopped, bytes of a table's file are changed, and it is started again: as a bad disk would leave it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import psycopg
import pytest

import safepoint
from safepoint.errors import Damaged
from safepoint.model import Obj
from safepoint.rows import BranchRow, CallRow, CheckpointRow, Lost, Numbers, TaskRow, WriteRow, replace
from safepoint.stores.base import Store
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, write_row
from tests.integration.test_verify import made
from tests.support import sweeping, sweeping_postgres
from tests.support.scale import SOAK
from tests.support.servers import Postgres, fresh_postgres_url

PAGE = 8192


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.close()


names = iter(range(10**6))


@pytest.fixture
def url(server: Postgres) -> str:
    return f"{server.url}&schema=s{next(names)}"


def schema_of(url: str) -> str:
    return url.rpartition("=")[2]


def ask(url: str, statement: str, *values: object) -> list[tuple[object, ...]]:
    with psycopg.connect(url.rpartition("&")[0], autocommit=True) as conn:
        cursor = conn.execute(statement.replace("{s}", schema_of(url)), values)
        return cursor.fetchall() if cursor.description else []


def spoil(server: Postgres, url: str, table: str, pages: list[int], *, toast: bool = False) -> None:
    """Change a byte in pages of a table's file, or of the file of its long values."""
    column = "reltoastrelid" if toast else "oid"
    ((path,),) = ask(url, f"SELECT pg_relation_filepath({column}::regclass) FROM pg_class WHERE oid = %s::regclass", f"{{s}}.{table}".replace("{s}", schema_of(url)))  # fmt: skip
    server.stop()
    with open(server.data / str(path), "r+b") as f:
        for page in pages:
            f.seek(page * PAGE + 5000)
            byte = f.read(1)
            assert byte, "there is no such page"
            f.seek(page * PAGE + 5000)
            f.write(bytes([byte[0] ^ 0xFF]))
    server.start()


def page_of(url: str, table: str, where: str, *values: object) -> int:
    ((block,),) = ask(url, f"SELECT (ctid::text::point)[0]::int FROM {{s}}.{table} WHERE {where}", *values)
    assert isinstance(block, int)
    return block


def parts_of(store: Store, task: str) -> dict[type, list[object]]:
    found: dict[type, list[object]] = {}
    for part in store.walk(task):
        found.setdefault(type(part), []).append(part)
    return found


@pytest.mark.parametrize(
    ("table", "kind", "cls"), [("sp_checkpoints", "checkpoint", CheckpointRow), ("sp_calls", "call", CallRow)]
)
def test_a_walk_goes_on_past_damaged_pages(server: Postgres, url: str, table: str, kind: str, cls: type) -> None:
    store = open_store(url, durability="process")
    image = sweeping.long_task(300)
    store.write_task(image)
    number = "seq" if kind == "checkpoint" else "no"
    store.close()
    pages = sorted({page_of(url, table, f"{number} = %s", n) for n in (100, 200)})
    on = {n for (n,) in ask(url, f"SELECT {number} FROM {{s}}.{table} WHERE (ctid::text::point)[0]::int = ANY(%s)", pages)}
    assert len(pages) == 2
    spoil(server, url, table, pages)
    store = open_store(url, durability="process")
    parts = parts_of(store, "long")
    there = {getattr(row, number) for row in parts[cls]}
    assert there == set(range(1, 301)) - on
    lost = [part for part in parts[Lost] if isinstance(part, Lost) and part.kind == kind and part.first is not None]
    named = {n for part in lost for n in range(part.first or 0, (part.last or 300) + 1)}
    assert on <= named
    assert named & there == set()
    assert len(lost) <= 4, "neighbours are one"
    assert len(parts[Obj]) == len(image.objects)
    assert {len(parts[c]) for c in (Numbers, TaskRow, BranchRow)} == {1}
    store.close()


def test_writes_on_a_damaged_page_hide_no_others(server: Postgres, url: str) -> None:
    store = open_store(url, durability="process")
    image = sweeping_postgres.written_task(300)
    long = WriteRow(space="ns", checkpoint="c", writer="w\0", idx=-1, data=random.Random(1).randbytes(40_000))
    beside = [replace(long, idx=0, data=b"small"), replace(long, checkpoint="d", data=b"small")]
    store.write_task(replace(image, writes=(*image.writes, long, *beside)))
    keys = {row.key for row in (*image.writes, long, *beside)}
    assert [row.key for row in store.walk("long") if isinstance(row, WriteRow)] == sorted(keys)
    store.close()
    pages = [page_of(url, "sp_writes", "checkpoint = %s", "c100")]
    on = {
        f"{c}" for (c,) in ask(url, "SELECT checkpoint FROM {s}.sp_writes WHERE (ctid::text::point)[0]::int = ANY(%s)", pages)
    }
    spoil(server, url, "sp_writes", pages)
    spoil(server, url, "sp_writes", [2], toast=True)
    store = open_store(url, durability="process")
    parts = parts_of(store, "long")
    there = {row.key for row in parts[WriteRow] if isinstance(row, WriteRow)}
    assert there == {key for key in keys if key[1] not in on} - {long.key}
    lost = [part for part in parts[Lost] if isinstance(part, Lost) and part.kind == "write"]
    assert any("'w\\x00'" in part.what and "'ns'" in part.what for part in lost)
    assert 2 <= len(lost) <= 1 + len(on)
    assert len(parts[CheckpointRow]) == len(parts[CallRow]) == 300
    assert len(parts[Obj]) == len(image.objects)
    rest, _ = store.writes("long", space="ns", checkpoints=["d"])
    assert [row.data for row in rest] == [b"small"]
    with pytest.raises(Damaged):
        store.prune("long", [])
    store.close()


def test_objects_on_a_damaged_page_are_named(server: Postgres, url: str) -> None:
    store = open_store(url, durability="process")
    image = sweeping.long_task(200)
    store.write_task(image)
    store.close()
    page = page_of(url, "sp_objects", "name = %s", image.objects[400].name)
    on = {bytes(n) for (n,) in ask(url, "SELECT name FROM {s}.sp_objects WHERE (ctid::text::point)[0]::int = %s", page)}  # type: ignore[call-overload]
    spoil(server, url, "sp_objects", [page])
    store = open_store(url, durability="process")
    parts = parts_of(store, "long")
    assert {obj.name for obj in parts[Obj] if isinstance(obj, Obj)} == {obj.name for obj in image.objects} - on
    assert len([part for part in parts[Lost] if isinstance(part, Lost) and part.kind == "object"]) >= 1
    bad = store.unreadable("long", range(1, 201))
    assert bad
    assert set(bad) < set(range(1, 201))
    # Rows may go; no object is deleted by a sweep that cannot see what they reach.
    assert store.prune("long", range(1, 100), sweep=False).seqs == tuple(range(1, 100))
    with pytest.raises(Damaged):
        store.prune("long", [])
    assert parts_of(store, "long")[Obj] == parts[Obj]
    store.close()


def test_a_long_value_that_is_damaged_costs_that_object_alone(server: Postgres, url: str) -> None:
    with safepoint.open(url, durability="process") as cp:
        state = safepoint.State("t")
        for i in range(6):
            state.step, state.agent_state = i, {"big": random.Random(i).randbytes(30_000), "small": i}
            cp.save(state)
    ((oid,),) = ask(url, "SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = '{s}.sp_objects'::regclass")
    ((pages,),) = ask(url, f"SELECT max((ctid::text::point)[0]::int) FROM {oid}")
    assert isinstance(pages, int)
    spoil(server, url, "sp_objects", [pages], toast=True)
    with safepoint.open(url, durability="process") as cp:
        lost = [part for part in cp.store.walk("t") if isinstance(part, Lost)]
        assert [part.kind for part in lost] == ["object"]
        assert len(lost[0].name) == 16
        report = cp.verify("t")
        assert [d.kind for d in report.damages] == ["object"]
        repaired = cp.repair()
        with safepoint.open(cp.store.beside(".repaired") or "") as other:
            assert other.verify().ok
            assert {c.seq for c in other.list_checkpoints("t")} == {1, 2, 3, 4, 5, 7}
        assert "t" in repaired.lost_checkpoints


def test_any_damaged_page_of_any_table_ends_no_walk_and_no_listing(server: Postgres, url: str) -> None:
    rng = random.Random(7)
    for _ in range(4 if not SOAK else 40):
        place = f"{server.url}&schema=s{next(names)}"
        store = open_store(place, durability="process")
        store.write_task(sweeping_postgres.written_task(60, task="a"))
        store.write_task(sweeping_postgres.written_task(60, task="b"))
        store.close()
        table = rng.choice(["sp_tasks", "sp_checkpoints", "sp_calls", "sp_objects", "sp_branches", "sp_writes"])
        ((size,),) = ask(place, "SELECT pg_relation_size('{s}." + table + "')::int / 8192")
        assert isinstance(size, int)
        spoil(server, place, table, [rng.randrange(size)])
        store = open_store(place, durability="process")
        tasks = list(store.walk_tasks())
        assert table == "sp_tasks" or tasks == ["a", "b"]
        assert [part for task in ("a", "b") for part in store.walk(task) if isinstance(part, Lost)], table
        list(store.structure())
        store.strays()
        store.close()


# -- copies and the quarantine


def test_a_copy_beside_has_everything_and_goes_on_with_the_numbers() -> None:
    url = fresh_postgres_url()
    with safepoint.open(url, durability="process") as cp:
        made(cp, "a")
        made(cp, "b")
        cp.store.delete_task("b")
        Writer(cp.store, "a").record(write_row("c"))
        copy = cp.store.backup(".copy")
        assert copy == cp.store.beside(".copy")
        with pytest.raises(safepoint.UsageError) as caught:
            cp.store.backup(".copy")
        assert "path" in caught.value.details
        with safepoint.open(copy, durability="process") as other:
            assert list(other.store.walk("a")) == list(cp.store.walk("a"))
            assert other.verify().ok
            made(other, "c")
            Writer(other.store, "a").record(write_row("d"))
            assert len(other.store.writes("a")[0]) == 2
            assert len(other.list_checkpoints("a")) == 6
        with cp.connection() as conn:
            conn.execute(f'DROP SCHEMA "{schema_of(url)}.copy" CASCADE')


def test_names_of_copies_fit_and_differ() -> None:
    from safepoint.stores.postgres.mend import beside

    assert beside("safepoint", ".repaired") == "safepoint.repaired"
    one, two = (beside("x" * 60 + end, ".before-repair-1") for end in "ab")
    assert one != two
    assert max(len(one.encode()), len(two.encode())) <= 63
    assert len(beside("\N{PILE OF POO}" * 15, ".before-repair-1").encode()) <= 63


def test_what_repair_sets_aside_is_kept_as_it_was_found() -> None:
    url = fresh_postgres_url()
    schema = schema_of(url)
    with safepoint.open(url, durability="process") as cp:
        made(cp)
        with cp.connection() as conn:
            before = conn.execute(f"SELECT row_to_json(t)::text FROM {schema}.sp_checkpoints t WHERE seq = 3").fetchall()
            conn.execute(f"UPDATE {schema}.sp_checkpoints SET label = 'edited' WHERE seq = 3")
        report = cp.repair(in_place=True)
        assert report.set_aside == 1
        assert report.backup is not None
        assert cp.verify().ok
        with cp.connection() as conn:
            kept = conn.execute(
                f"SELECT kind, task, key, (convert_from(data, 'UTF8')::json->'row')::text FROM {schema}.sp_quarantine"
            ).fetchall()
        assert [row[:3] for row in kept] == [("checkpoint", "t", "3")]
        assert kept[0][3] == before[0][0].replace('"label":null', '"label":"edited"')
        with safepoint.open(report.backup, durability="process") as other:
            assert not other.verify().ok, "the copy has the damage"
        with cp.connection() as conn:
            conn.execute(f'DROP SCHEMA "{schema}.before-repair-1" CASCADE')


def test_a_text_that_is_no_utf8_is_damage(url: str) -> None:
    store = open_store(url)
    writer = Writer(store)
    writer.save()
    writer.call()
    writer.record(write_row("c"))
    spoilt = {"sp_writes": "path", "sp_checkpoints": "label", "sp_calls": "tool", "sp_branches": "name", "sp_tasks": "agent"}
    with psycopg.connect(url.rpartition("&")[0]) as conn:
        # The server lets no such text in, but by a cast that looks at nothing.
        conn.execute("CREATE CAST (bytea AS text) WITHOUT FUNCTION")
        for table, column in spoilt.items():
            conn.execute(f"UPDATE {schema_of(url)}.{table} SET {column} = '\\xff'::bytea::text")
        conn.execute("DROP CAST (bytea AS text)")
    for read in (store.task, store.branches, store.headers, store.calls, store.writes, lambda task: store.read(task, seq=1)):
        with pytest.raises(Damaged):
            read("task")
    with pytest.raises(Damaged):
        store.tasks()
    assert list(store.unreadable("task", [1])) == [1]
    store.close()
