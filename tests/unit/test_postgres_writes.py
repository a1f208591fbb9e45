"""Writes of adapters in the PostgreSQL store: what they cost, big ones that are staged, and rows that repair sets aside."""

import pytest

from safepoint.errors import Damaged
from safepoint.model import new_id
from safepoint.rows import Aside, BranchWrite, Commit, TaskPatch, replace
from safepoint.stores.postgres.commit import Commits
from safepoint.stores.url import open_store
from safepoint.testing.build import Writer, obj, tree, write_row
from safepoint.testing.whole import image_of
from tests.support.servers import fresh_postgres_url


@pytest.fixture
def url():
    return fresh_postgres_url()


@pytest.fixture
def store(url):
    store = open_store(url, durability="process")
    yield store
    store.close()


def test_what_needs_no_number_is_one_request_whatever_was_foreseen(url, store, monkeypatch):
    writer = Writer(store)
    first = writer.save().head
    head = writer.save().head
    writer.call()
    sent = []
    send = Commits._send

    def counted(*args):
        sent.append(1)
        return send(*args)

    monkeypatch.setattr(Commits, "_send", counted)
    other = open_store(url, durability="process")
    there = Writer(other, head=writer.head)
    there.record(write_row("c", tree("a")[:1]), objects=tree("a"), stands_on=writer.head)
    other.close()
    assert len(sent) == 1
    for _ in range(3):
        writer.call()  # the other store knows the numbers from before these
        store.commit(Commit(task="task", id=new_id(), patch=TaskPatch(reason="r")))
    other = open_store(url, durability="process")
    assert head is not None
    sent.clear()
    other.commit(Commit(task="task", id=new_id(), branches=(BranchWrite(name="main", expect=head, to=first),)))
    assert len(sent) == 1
    numbers = next(iter(other.walk("task")))
    assert (numbers.seq, numbers.call) == (2, 4)
    assert other.commit(Writer(other, head=first).commit()).seq == 3
    other.close()


def test_bytes_of_what_is_left_out_are_not_counted(store):
    writer = Writer(store)
    row = write_row("c", data=b"x" * 1000)
    assert writer.record(row).bytes_written > 1000
    assert writer.record(row, write_row("d")).bytes_written < 100


@pytest.mark.parametrize("guarded", [False, True])
def test_a_big_commit_of_writes_is_staged(store, guarded):
    writer = Writer(store)
    if guarded:
        writer.guard = store.acquire("task", b"me").guard
    parts = [obj(b"%d" % i + b"x" * 700_000) for i in range(4)]
    page = obj(b"page", *parts)
    assert writer.record(write_row("c", [page]), objects=[page, *parts]).bytes_written > 2_800_000
    assert len(store.writes("task")[1]) == 5
    with store.connection() as conn:
        assert conn.execute(f'SELECT count(*) FROM "{store._db.schema}".sp_stages').fetchall() == [(0,)]
    assert store.prune("task", []).objects == 0


def test_a_changed_row_hides_no_others_and_is_set_aside(store):
    writer = Writer(store)
    writer.save()
    writer.record(*(write_row("c", writer=w, path="p\0q") for w in ("v", "w\0", "x")))
    with store.connection() as conn:
        table = f'"{store._db.schema}".sp_writes'
        conn.execute(f"UPDATE {table} SET data = 'changed' WHERE writer LIKE 'w%%'")
    rows, _ = store.writes("task")
    assert [row.writer for row in rows] == ["v", "w\0", "x"]
    rows[0].check("task", "it")
    with pytest.raises(Damaged):
        rows[1].check("task", "it")
    image = image_of(store, "task")
    bad = image.writes[1]
    assert bad.key == ("", "c", "w\0", 0)
    assert store.place("task", "write", bad.key).endswith(r"'', 'c', 'w\x00', 0")
    left = replace(image, writes=(image.writes[0], image.writes[2]))
    assert store.set_aside(left, [Aside("write", bad.key, "it is damaged")], [], []) == 1
    assert [row.writer for row in store.writes("task")[0]] == ["v", "x"]
    with store.connection() as conn:
        kept = conn.execute(f'SELECT kind, task, key FROM "{store._db.schema}".sp_quarantine').fetchall()
    assert kept == [("write", "task", r"('', 'c', 'w\x00', 0)")]


def test_what_is_no_text_of_an_id_is_not_there(store):
    writer = Writer(store)
    writer.record(write_row("c"))
    assert store.writes("task", checkpoints=["c\0", "c"])[0] == store.writes("task")[0]
    assert store.writes("task", space="\0") == ([], {})
