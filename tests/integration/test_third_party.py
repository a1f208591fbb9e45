"""Stores of other packages: the one of docs/write-a-store.md, built into wheels, installed by pip and opened like any other.

Everything here happens in processes that have the packages on their path, as a user's would.
"""

import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import zipfile

import pytest

import safepoint
from tests.support.paths import ROOT
from tests.support.scale import SOAK
from tests.support.seeds import fresh_seed

PAGE = (ROOT / "docs" / "write-a-store.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
STORE, TESTS = ("\n".join(BLOCK.findall(part)) for part in PAGE.split("## Test it"))


def wheel(folder, name, points, **modules):
    """Build one by hand: what pip asks of it is little."""
    info = f"{name}-1.0.dist-info"
    files = {f"{module}.py": source for module, source in modules.items()}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = "[safepoint.stores]\n" + "".join(f"{s} = {where}\n" for s, where in points.items())

    def line(path, text):
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        return f"{path},sha256={digest},{len(text.encode())}\n"

    files[f"{info}/RECORD"] = "".join(line(*file) for file in files.items()) + f"{info}/RECORD,,\n"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return str(path)


def install(site, *wheels):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    done = subprocess.run(
        [*pip, "--no-index", "--no-deps", "--no-warn-conflicts", "--target", str(site), *wheels], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("third")
    install(folder / "site", wheel(folder, "safepoint_shelf", {"fake": "shelf_store:open_shelf"}, shelf_store=STORE))
    return folder / "site"


def python(*args, site, cwd, **more):
    env = {**os.environ, "PYTHONPATH": str(site), **more.pop("env", {})}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=110, **more)


@pytest.fixture
def script(site, tmp_path):
    """Run a program that prints one JSON value."""

    def run(source, *args):
        done = python("-W", "error", "-c", source, *args, site=site, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def command(site, tmp_path):
    def run(*args, url=None):
        env = {"SAFEPOINT_URL": url} if url else {}
        done = python("-W", "error", "-m", "safepoint", *args, "--json", site=site, cwd=tmp_path, env=env)
        return done.returncode, json.loads(done.stdout)

    return run


def test_it_is_opened_by_its_url(script, tmp_path):
    seen = script("""
import json, safepoint
from safepoint.stores.url import schemes
with safepoint.open("fake:///tasks?timeout=3", durability="process") as cp:
    state = safepoint.State("t", messages=["a"])
    cp.save(state)
    found = [type(cp.store).__name__, cp.store.timeout, cp.durability, cp.store.url]
with safepoint.open("FAKE:///tasks") as cp:
    found += [cp.load_latest("t").messages, cp.durability]
print(json.dumps([*found, "fake" in schemes()]))
""")
    place = f"shelf:///{tmp_path}/tasks"
    assert seen == ["ShelfStore", 3.0, "process", place, ["a"], "full", True]
    assert (tmp_path / "tasks").is_dir()


def test_agents_run_on_it(script):
    seen = script("""
import asyncio, json, safepoint
from safepoint import run_agent, run_agent_async
sent = []
@safepoint.tool(effect="write")
def send(to: str) -> str:
    sent.append(to)
    return "ok"
def step(run):
    run.finish(run.call(send, "bob"))
outcomes = [run_agent(step, task_id="t", store="fake:///tasks").result for _ in range(2)]
async def astep(run):
    run.finish(await run.call(send, "ann"))
outcomes.append(asyncio.run(run_agent_async(astep, task_id="u", store="fake:///tasks")).result)
with safepoint.open("fake:///tasks") as cp:
    outcomes.append([t.status for t in cp.tasks()])
    outcomes.append(cp.verify().ok)
print(json.dumps([outcomes, sent]))
""")
    assert seen == [["ok", "ok", "ok", ["finished", "finished"], True], ["bob", "ann"]]


def test_a_killed_agent_carries_on(site, tmp_path, script):
    program = """
import os, safepoint, sys
@safepoint.tool(effect="idempotent")
def count() -> int:
    with open("counted", "a") as file:
        file.write("x")
    return 1
def step(run):
    run.call(count)
    if run.state.step == 2 and len(sys.argv) > 1:
        os.kill(os.getpid(), 9)
    if run.state.step == 3:
        run.finish("done")
print('"%s"' % safepoint.run_agent(step, task_id="t", store="fake:///tasks").result)
"""
    assert python("-c", program, "die", site=site, cwd=tmp_path).returncode == -signal.SIGKILL
    assert script(program) == "done"
    assert (tmp_path / "counted").read_text() == "xxxx", "what is on record is not called again"


def test_the_command_line_opens_it(command, tmp_path):
    with safepoint.open(f"sqlite:///{tmp_path}/agent.db") as cp:
        cp.save(safepoint.State("t", messages=["a", "b"]))
    sqlite, fake = f"sqlite:///{tmp_path}/agent.db", f"fake:///{tmp_path}/tasks"
    assert command("--store", sqlite, "copy", "--to", fake)[0] == 0
    code, data = command("ls", url=fake)
    assert (code, [t["task_id"] for t in data["tasks"]]) == (0, ["t"])
    assert command("show", "t", "--store", fake)[1]["messages"] == ["a", "b"]
    assert command("verify", url=fake)[1]["ok"] is True
    assert command("check", url=fake) == (
        0,
        {
            "ok": True,
            "findings": [{"name": "write", "level": "ok", "text": "a write was made durable and read back", "remedy": ""}],
        },
    )
    assert command("ls", "--leases", url=fake)[1] == {"leases": []}
    assert command("rm", "t", "--yes", url=fake)[1]["deleted"] is True
    code, data = command("ls", url=f"{fake}?durabilty=full")
    assert (code, data["error"]["type"]) == (2, "UsageError")
    assert "known ones are durability, timeout" in data["error"]["why"]


def test_it_passes_the_contract(site, tmp_path):
    # As on the page, but for the length of the machine's lives and what they draw from: that it comes to everything is tested of our own stores.
    short = f"profile=settings(max_examples=25, stateful_step_count=50), everything=False, seed={fresh_seed()}"
    tests = TESTS.replace("run_machine(ShelfMachine)", f"run_machine(ShelfMachine, {short})")
    assert short in tests
    source = f"from hypothesis import settings\nfrom shelf_store import *\n{tests}"
    (tmp_path / "test_shelf.py").write_text(source, encoding="utf-8")
    only = [] if SOAK else ["-k", "not machine"]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *only, "test_shelf.py", site=site, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|skipped|deselected)", done.stdout)}
    assert counts["passed"] >= 130
    skips = re.findall(r"^SKIPPED .*: (.*)$", done.stdout, re.MULTILINE)
    assert skips
    assert set(skips) == {"transactional_tools is False"}


# A store that breaks one promise, and how the contract finds it.
BROKEN = {
    "what landed lands twice": (
        "def commit(self, commit):\n"
        "        from safepoint.model import new_id\n"
        "        return super().commit(replace(commit, id=new_id()))"
    ),
    "fences are not compared": "def _is(self, doc, guard):\n        return doc.lease is not None",
    "a stolen holder is called dead": (
        "def acquire(self, task, holder, *, steal=False):\n"
        "        return replace(super().acquire(task, holder, steal=steal), previous='dead', presumed=0)"
    ),
    "what is needed is deleted": (
        "def prune(self, task, seqs, **options):\n"
        "        folding.needed, kept = lambda *args: set(), folding.needed\n"
        "        try:\n"
        "            return super().prune(task, seqs, **options)\n"
        "        finally:\n"
        "            folding.needed = kept"
    ),
}


def test_the_contract_finds_a_store_that_breaks_it(site, tmp_path):
    source = "from shelf_store import *\n"
    for i, body in enumerate(BROKEN.values()):
        source += f"class Broken{i}(ShelfStore):\n    {body}\n"
        tests = TESTS[: TESTS.index("class ShelfMachine")]
        source += tests.replace("ShelfStore(", f"Broken{i}(").replace("TestShelf", f"TestBroken{i}")
    (tmp_path / "test_broken.py").write_text(source, encoding="utf-8")
    # In small the tests that are about these promises; that the others do not mind is no news.
    only = [] if SOAK else ["-k", "landed or again or guard or stolen or lease or prune or kept"]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *only, "test_broken.py", site=site, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    for i, promise in enumerate(BROKEN):
        assert f"FAILED test_broken.py::TestBroken{i}::" in done.stdout, promise


# -- packages that do not work

WRONG = """
import safepoint
from safepoint.stores.base import Store
from safepoint.stores.memory import MemoryStore

class Half(Store):
    def commit(self, commit): ...

class Silent(MemoryStore):
    def __init__(self): pass

def half(url, **options): return Half()
def silent(url, **options): return Silent()
def no_store(url, **options): return {}
def refuses(url, **options): raise safepoint.Unavailable("the place is closed", "it is Sunday", "Come back.")
def unreachable(url, **options): raise ConnectionRefusedError(f"cannot reach {url}")
def stumbles(url, **options): raise KeyError(url)
def old(url): return MemoryStore()
def narrow(url, *, durability="full", timeout=10.0, pages=1): return MemoryStore()
def tells(url, **options):
    store = MemoryStore()
    store.url = url
    return store
thing = 3
"""
SCHEMES = ("half", "silent", "no_store", "refuses", "unreachable", "stumbles", "old", "narrow", "tells", "thing", "absent")
ASK = """
import json, safepoint, sys
found = {}
for url in json.loads(sys.argv[1]):
    options = {"colour": "red"} if url.startswith("narrow") else {}
    try:
        safepoint.open(url, **options).close()
    except safepoint.SafepointError as error:
        found[url.partition(":")[0]] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wrong_site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    points = {s.replace("_", "-"): f"wrong_store:{s}" for s in SCHEMES}
    extra = "import safepoint\nraise safepoint.MissingExtra('x needs y', '', \"pip install 'x[y]'\")"
    install(
        folder / "site",
        wheel(folder, "wrong_stores", points, wrong_store=WRONG),
        wheel(folder, "breaking", {"broken": "breaking:open"}, breaking="1 / 0"),
        wheel(folder, "lacking", {"lacking": "lacking:open"}, lacking=extra),
        wheel(folder, "shelf_one", {"twice": "one_store:open"}, one_store=""),
        wheel(folder, "shelf_two", {"twice": "two_store:open"}, two_store=""),
    )
    return folder / "site"


def test_what_does_not_work_is_a_clear_error(wrong_site, tmp_path):
    names = [*(s.replace("_", "-") for s in SCHEMES), "broken", "lacking", "twice", "nosuch"]
    urls = [f"{name}://u:hush@host/place" for name in names]
    done = python("-W", "error", "-c", ASK, json.dumps(urls), site=wrong_site, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(names)
    says = {
        "half": ("UsageError", "lacks methods of the contract", "abstract", "abandon", "authors of wrong_stores"),
        "silent": ("UsageError", "does not say what it is", "durability, timeout, url"),
        "no-store": ("UsageError", "made no store", "it made a dict"),
        "refuses": ("Unavailable", "the place is closed", "Come back."),
        "unreachable": ("Unavailable", "cannot be opened", "ConnectionRefusedError", "***"),
        "stumbles": ("UsageError", "wrong_store:stumbles failed to open", "KeyError"),
        "old": ("UsageError", "does not take durability=", "authors of wrong_stores"),
        "narrow": ("UsageError", "unknown option 'colour'", "known ones are durability, pages, timeout"),
        "tells": ("UsageError", "shows a password"),
        "thing": ("UsageError", "opens nothing", "it is a int"),
        "absent": ("UsageError", "absent:// cannot be loaded", "AttributeError"),
        "broken": ("UsageError", "broken:// cannot be loaded", "ZeroDivisionError"),
        "lacking": ("MissingExtra", "pip install 'x[y]'"),
        "twice": ("UsageError", "offered by more than one package", "shelf_one, shelf_two"),
        "nosuch": ("UsageError", "unknown scheme 'nosuch'", "refuses"),
    }
    assert set(says) == set(names)
    for name, (kind, *parts) in says.items():
        assert found[name][0] == kind, found[name]
        for part in parts:
            assert part in found[name][1], (name, found[name][1])
        assert "hush" not in found[name][1]
    for name in SCHEMES[:3]:  # the command line says the same, and nothing of a traceback
        name = name.replace("_", "-")
        done = python("-m", "safepoint", "ls", "--store", f"{name}://u:hush@host", site=wrong_site, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        assert "hush" not in done.stderr
