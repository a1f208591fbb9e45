"""URLs: what they open, what is refused and how, and that no password is ever shown."""

import importlib.metadata
import os
import sys
import types

import pytest

from safepoint.errors import UsageError
from safepoint.rows import CheckpointRow, Commit
from safepoint.stores import url as module
from safepoint.stores.memory import MemoryStore
from safepoint.stores.url import open_store, redact, schemes, split_url


def first(store, task="t"):
    row = CheckpointRow(id="a", step=0, kind="step", created_at=1, format=1, schema=1, size=1, digest=b"d" * 16)
    return store.commit(Commit(task=task, id="a", checkpoint=row))


def test_a_private_memory_store_is_seen_by_nobody_else():
    one, two = open_store("memory://"), open_store("memory://")
    first(one)
    assert [t.task for t in one.tasks()] == ["t"]
    assert two.tasks() == []


def test_a_named_memory_store_is_shared_until_its_last_handle_is_closed():
    one, two = open_store("memory://shared"), open_store("memory://shared")
    first(one)
    one.close()
    assert [t.task for t in two.tasks()] == ["t"]
    three = open_store("memory://shared")
    assert [t.task for t in three.tasks()] == ["t"]
    two.close()
    three.close()
    four = open_store("memory://shared")
    assert four.tasks() == []
    assert open_store("memory://other").tasks() == []


def test_a_closed_handle_lets_go_of_what_it_held():
    one, two = open_store("memory://leases"), open_store("memory://leases")
    one.acquire("t", b"")
    one.close()
    assert two.acquire("t", b"").previous == "dead"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings(r"ignore:.*use of fork\(\):DeprecationWarning")  # Python 3.12 and newer
def test_a_forked_child_has_a_copy_in_which_the_parent_holds_nothing():
    store = open_store("memory://forked")
    grant = store.acquire("t", b"")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            seen = [store.holds("t", grant.guard), store.acquire("t", b"").previous, bool(first(store, "child"))]
            os.write(write, repr(seen).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        assert answer.read().decode() == "[False, 'dead', True]"
    os.waitpid(pid, 0)
    assert store.holds("t", grant.guard)
    assert [t.task for t in store.tasks()] == ["t"]


def test_a_store_is_handed_back():
    store = MemoryStore()
    assert open_store(store) is store
    assert open_store(store, timeout=None) is store
    with pytest.raises(UsageError, match="timeout come too late"):
        open_store(store, timeout=5)


def sqlite():
    return pytest.importorskip("safepoint.stores.sqlite", exc_type=ImportError)


def test_relative_paths_are_resolved_when_the_store_is_opened(tmp_path, monkeypatch):
    sqlite()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    store = open_store("sqlite:///agent.db")
    monkeypatch.chdir(tmp_path / "b")
    first(store)
    store.close()
    assert (tmp_path / "a" / "agent.db").exists()
    assert not (tmp_path / "b" / "agent.db").exists()


def test_absolute_paths_have_four_slashes_and_may_be_quoted(tmp_path):
    sqlite()
    store = open_store(f"sqlite:///{tmp_path}/what%3F%20is.db?timeout=2.5&durability=process", durability="process")
    first(store)
    assert (store.timeout, store.durability) == (2.5, "process")
    store.close()
    assert (tmp_path / "what? is.db").exists()


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("agent.db", {}, "sqlite:///agent.db"),
        ("", {}, "no scheme"),
        (b"sqlite:///x", {}, "not by a bytes"),
        ("sqlite3:///x", {}, "known ones are file, memory, postgres, postgresql, redis"),
        ("sqlite://agent.db", {}, "sqlite:///agent.db"),
        ("sqlite://", {}, "three slashes"),
        ("sqlite:///", {}, "memory://"),
        ("sqlite:///:memory:", {}, "memory://"),
        ("sqlite:///x?durabilty=full", {}, "durability, network_ok, timeout"),
        ("sqlite:///x", {"tiemout": 3}, "durability, network_ok, timeout"),
        ("sqlite:///x?timeout=soon", {}, "number of seconds"),
        ("sqlite:///x?timeout=nan", {}, "number of seconds"),
        ("sqlite:///x?timeout=-1", {}, "number of seconds"),
        ("sqlite:///x?timeout=1&timeout=2", {}, "comes twice"),
        ("sqlite:///x?timeout=1", {"timeout": 2}, "two values"),
        ("sqlite:///x?durability=most", {}, "full or process"),
        ("sqlite:///x", {"durability": "none"}, "full or process"),
        ("sqlite:///x?network_ok=maybe", {}, "true or false"),
        ("memory://x?size=3", {}, "durability, timeout"),
        ("memory://%20", {}, "blank"),
        ("file://host/x", {}, "names a host"),
        ("postgresql://h/db?lease=0.5", {}, "1 or more"),
        ("redis://h?ttl=0", {}, "1 or more"),
    ],
)
def test_what_is_refused_says_what_would_do(url, options, says):
    with pytest.raises(UsageError) as caught:
        open_store(url, **options)
    assert says in str(caught.value)


def test_openers_of_other_packages_split_urls_as_the_built_in_ones():
    known = {"pages": (int, "a number of pages")}
    url = "acme:///my%20folder?timeout=2.5&pages=7"
    assert split_url(url, {"durability": "process"}, known) == (
        "/my folder",
        {"timeout": 2.5, "pages": 7, "durability": "process"},
    )
    assert split_url("acme://", {}) == ("", {})
    for wrong, given, says in (
        ("acme://h?colour=red", {}, "known ones are durability, pages, timeout"),
        ("acme://h?pages=x", {}, "'pages' must be a number of pages"),
        ("acme://h?pages=1", {"pages": 2}, "two values"),
        ("acme://u:hush@h?pages=1&pages=1", {}, "comes twice"),
        ("acme://u:hush@h", {"colour": 1}, "unknown option 'colour'"),
    ):
        with pytest.raises(UsageError) as caught:
            split_url(wrong, given, known)
        assert says in str(caught.value)
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:hush@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("postgresql://u:hu/s?h@hush#@h/db", "postgresql://u:***@h/db"),
        ("redis://:hush@h", "redis://:***@h"),
        ("postgresql://h/db?password=hush&sslmode=require", "postgresql://h/db?password=***&sslmode=require"),
        ("postgresql://h/db?sslpassword=hush", "postgresql://h/db?sslpassword=***"),
        ("x://h?auth_token=hush", "x://h?auth_token=***"),
        ("host=h password='hush hush' dbname=d", "host=h password=*** dbname=d"),
        ("sqlite:////home/a:b@c/agent.db", "sqlite:////home/a:b@c/agent.db"),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("memory://", "memory://"),
    ],
)
def test_passwords_are_hidden(url, shown):
    assert redact(url) == shown


@pytest.mark.parametrize("url", ["nosuch://u:hush@h/db", "u:hush@h?password=hush", "sqlite://u:hush@h/x"])
def test_no_error_shows_a_password(url):
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "hush" not in str(caught.value)


class _Points:
    """Entry points as installed packages would give them; only the look-up by group is replaced."""

    def __init__(self, monkeypatch):
        self.points: list[importlib.metadata.EntryPoint] = []
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [p for p in self.points if p.group == group])
        self.home = types.ModuleType("third_party_store")
        monkeypatch.setitem(sys.modules, "third_party_store", self.home)

    def add(self, name, attribute, opener=None):
        if opener is not None:
            setattr(self.home, attribute, opener)
        point = importlib.metadata.EntryPoint(name, f"third_party_store:{attribute}", module.ENTRY_POINTS)
        self.points.append(point)


@pytest.fixture
def points(monkeypatch):
    return _Points(monkeypatch)


def test_another_package_may_bring_a_scheme(points):
    seen = []

    def make(url, **options):
        seen.append((url, options))
        return MemoryStore()

    points.add("acme", "make", make)
    assert isinstance(open_store("acme://u:p@h/x?y=1", timeout=3), MemoryStore)
    assert seen == [("acme://u:p@h/x?y=1", {"timeout": 3})]
    assert {"acme", "file", "memory", "postgresql", "redis", "sqlite"} <= set(schemes())


def test_another_package_cannot_take_a_built_in_scheme(points):
    points.add("memory", "make", lambda url, **options: pytest.fail("not to be asked"))
    open_store("memory://")


def test_a_package_that_does_not_work_is_named(points):
    points.add("acme", "missing")
    with pytest.raises(UsageError, match="acme:// cannot be loaded"):
        open_store("acme://")
    points.points.clear()
    points.add("acme", "dict", lambda url: {})
    with pytest.raises(UsageError, match="made no store"):
        open_store("acme://")
    points.add("acme", "second", lambda url: MemoryStore())
    with pytest.raises(UsageError, match="more than one package"):
        open_store("acme://")
