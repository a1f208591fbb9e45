"""The command line tells the same of the same tasks, in whatever store they lie."""

import io
import json
import subprocess
import sys

import pytest

from safepoint.cli import main
from tests.integration.conftest import STORES, new_url
from tests.support.cli_store import HOSTILE
from tests.support.paths import ROOT

SCRIPT = ROOT / "tests" / "support" / "cli_store.py"
TASKS = (*HOSTILE, "mailing", "asking", "done", "failing", "kept", "losing", "ready")

LOOKS = [
    ("ls",),
    ("ls", "--status", "unfinished"),
    ("ls", "--leases"),
    *((command, "--", task) for command in ("log", "calls", "pauses", "plan", "branches", "show") for task in TASKS),
    ("calls", "--full", "mailing"),
    ("show", "kept@2"),
    ("pauses", "--all", "ready"),
    ("diff", "kept@1", "5"),
    ("cleanup", "kept", "--keep-latest", "2", "--dry-run"),
]
DOES = [
    ("answer", "asking", "1", '{"yes": true}'),
    ("resolve", "--not-done", "--yes", "mailing", "3"),
    ("pin", "kept@2"),
    ("rewind", "--yes", "kept@3"),
    ("fork", "kept@2", "aside"),
    ("cleanup", "kept", "--keep-latest", "1"),
    ("release", "--yes", "kept"),
    ("rm", "--yes", "done"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('cli')}/agent.db"
    subprocess.run([sys.executable, str(SCRIPT), url], check=True, stdout=subprocess.DEVNULL)
    return url


@pytest.fixture
def told(capsys, monkeypatch):
    def run(url, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        code = main(["--json", "--store", url, *args])
        return code, json.loads(capsys.readouterr().out)

    return run


# How much room something takes, when it was done, and hints, which name the store.
OWN = frozenset(
    {"bytes_freed", "objects_deleted", "updated_at", "created_at", "answered_at", "finished_at", "id", "ms", "remedy"}
)
WHOLE = frozenset({"bytes", "digest"})
"""What else is another where states are kept whole."""


def plain(document, left_out):
    if isinstance(document, dict):
        return {k: plain(v, left_out) for k, v in document.items() if k not in left_out}
    return [plain(v, left_out) for v in document] if isinstance(document, list) else document


@pytest.mark.parametrize("kind", [kind for kind in STORES if kind not in {"memory", "sqlite"}])
def test_every_store_tells_the_same(kind, original, told, tmp_path):
    mine, other = f"sqlite:///{tmp_path}/mine.db", new_url(kind, tmp_path)
    for url in (mine, other):
        assert told(original, "copy", "--to", url)[0] == 0
    left_out = OWN | WHOLE if kind == "file" else OWN
    for args in (*LOOKS, *DOES, *LOOKS):
        expected, found = (told(url, *args) for url in (mine, other))
        assert (found[0], plain(found[1], left_out)) == (expected[0], plain(expected[1], left_out)), args
        assert expected[0] in {0, 3}, args  # 3: what was removed on the way is not there on either
    assert told(other, "verify")[1]["ok"] is True
