"""What adapters record in the file store, and branches that are set back or dropped: as lines, when lines are lost, and as folders."""

import json

import pytest

from safepoint.codec import values
from safepoint.codec.registry import Registry
from safepoint.errors import Damaged
from safepoint.model import new_id
from safepoint.rows import BranchWrite, Commit, Head, Lost, WriteRow
from safepoint.stores.file import FileStore
from safepoint.testing.build import Writer, write_row


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def opened(root):
    stores = []

    def open_one():
        stores.append(FileStore(root, durability="process"))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def journal(root):
    return (root / "task" / "journal.jsonl").read_bytes().splitlines(keepends=True)


def lose(root, at, how):
    """Delete a line, or change what it says."""
    lines = journal(root)
    if how == "deleted":
        del lines[at]
    else:
        spot = lines[at].index(b'"at":') + 7
        lines[at] = lines[at][:spot] + bytes([lines[at][spot] ^ 1]) + lines[at][spot + 1 :]
    (root / "task" / "journal.jsonl").write_bytes(b"".join(lines))


def begun(store):
    """main at 3 and side at 4, with a write against 2."""
    writer = Writer(store)
    for i in range(3):
        writer.save(row={"id": f"c{i + 1}"})
    side = Writer(store, branch="side")
    side.save(row={"parent_seq": 1})
    writer.record(write_row("c2", data=values.encode({"said": "yes"}, Registry(), path="data")))
    return writer, side


def move(store, branch, to):
    store.commit(Commit(task="task", id=new_id(), branches=(BranchWrite(name=branch.branch, expect=branch.head, to=to),)))


def test_lines_show_what_was_recorded(root, opened):
    store = opened()
    writer, side = begun(store)
    old = store.branches("task")
    move(store, side, None)
    writer.head = None
    shown = [json.loads(line) for line in journal(root)[-2:]]
    assert shown[0]["writes"][0]["data"] == {"said": "yes"}
    assert {key: shown[0]["writes"][0][key] for key in ("against", "writer", "idx")} == {
        "against": "c2",
        "writer": "w",
        "idx": 0,
    }
    assert shown[1]["branches"] == [{"space": "", "name": "side"}]
    before = list(store.walk("task"))
    assert [row.key for row in before if isinstance(row, WriteRow)] == [("", "c2", "w", 0)]
    assert old[:1] == [row for row in before if row == old[0]]
    assert list(opened().walk("task")) == before
    # What is pruned takes the journal anew, and the folder of a branch that is no more.
    assert (root / "task" / "side").is_dir()
    assert store.prune("task", [1, 4]).seqs == (1, 4)
    assert not (root / "task" / "side").exists()
    assert [row.key for row in opened().writes("task")[0]] == [("", "c2", "w", 0)]
    assert store.prune("task", [2]).seqs == (2,)
    assert opened().writes("task") == ([], {})


@pytest.mark.parametrize("how", ["deleted", "changed"])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("drops", [False, True])
def test_a_lost_line_that_moved_a_branch_leaves_its_head_unknown(root, opened, how, after, drops):
    """The numbers of the line after it are as if nothing had been lost: it has to tell how often branches were moved."""
    store = opened()
    writer, side = begun(store)
    first = store.headers("task")[-1]
    move(store, side if drops else writer, None if drops else Head(first.seq, first.id))
    for i in range(after):
        writer.record(write_row("c9", writer=f"w{i}"))
    if after == 0 and how == "deleted":
        return  # nobody can tell
    lose(root, len(journal(root)) - 1 - after, how)
    found = opened()
    for branch in ("main", "side"):
        with pytest.raises(Damaged, match="line 7"):
            found.read("task", branch=branch)
    with pytest.raises(Damaged):
        move(found, writer, None)
    assert found.prune("task", [1, 2, 3, 4]).seqs == ()
    assert found.read("task", seq=2) is not None


@pytest.mark.parametrize("how", ["deleted", "changed"])
def test_a_lost_line_of_writes_moves_no_branch_and_is_told(root, opened, how):
    store = opened()
    writer, _ = begun(store)
    writer.record(write_row("c2", writer="x"))
    writer.record(write_row("c2", writer="y"))
    lose(root, len(journal(root)) - 2, how)
    found = opened()
    for branch, seq in (("main", 3), ("side", 4)):
        row, _ = found.read("task", branch=branch)
        assert row.seq == seq
    with pytest.raises(Damaged, match="line 7"):
        found.writes("task")  # the work of a writer may be on record, and is not to be done again unseen
    parts = list(found.walk("task"))
    assert [row.writer for row in parts if isinstance(row, WriteRow)] == ["w", "y"]
    assert [part.where for part in parts if isinstance(part, Lost)] == ["task/journal.jsonl, line 7"]


def test_moves_are_told_by_every_line_also_of_a_journal_that_was_written_anew(root, opened):
    store = opened()
    writer, side = begun(store)
    move(store, side, None)
    assert store.prune("task", [4]).seqs == (4,)
    store.pin("task", 1, True)
    writer.record(write_row("c2", writer="x"))
    assert [json.loads(line).get("moved", 0) for line in (*journal(root)[:1], *journal(root)[-2:])] == [1, 1, 1]
    lose(root, len(journal(root)) - 2, "changed")  # the pin's
    found = opened()
    assert found.read("task")[0].seq == 3


def test_whole_headers_hide_nothing_behind_a_document_that_is_damaged(root, opened):
    store = opened()
    begun(store)
    document = root / "task" / "main" / "2.json"
    document.write_text(document.read_text().replace('"step": 0', '"step": 5'))
    found = opened().headers("task", space=None, roots=True)
    assert [row.seq for row in found] == [4, 3, 2, 1]
    for row in found:
        if row.seq == 2:
            with pytest.raises(Damaged):
                row.check("task", "it")
        else:
            row.check("task", "it")
            assert row.root
