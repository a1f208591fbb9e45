"""The base install is enough for all that needs no extra, and pulls nothing optional in where it happens to be installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.optional import OPTIONAL, needs_extra
from tests.support.paths import modules

# Runs in a process of its own, since this one has imported half of what is to be kept out.
IMPORTER = """
import importlib, json, sys

blocked, names = map(json.loads, sys.argv[1:])

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r} (kept out by the test)", name=name)
        return None

sys.meta_path.insert(0, Refuse())
outcome = {}
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as error:
        outcome[name] = [[cls.__name__ for cls in type(error).__mro__], str(error)]
    else:
        outcome[name] = None
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"outcome": outcome, "loaded": loaded}))
"""


def import_in_fresh_process(names: list[str], blocked: frozenset[str], tmp_path: Path) -> dict:
    # -I: nothing from the environment or the current folder; -W error: an import that warns is a failure too.
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", IMPORTER, json.dumps(sorted(blocked)), json.dumps(names)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_part_that_needs_no_extra_imports_without_extras(tmp_path):
    # __main__ modules act when they are imported.
    names = [name for name in modules() if not name.endswith("__main__")]
    outcome = import_in_fresh_process(names, OPTIONAL, tmp_path)["outcome"]
    broken = {name: error for name, error in outcome.items() if error is not None and not needs_extra(name)}
    assert not broken


def test_a_part_that_needs_an_extra_names_it(tmp_path):
    names = [name for name in modules() if needs_extra(name) and not name.endswith("__main__")]
    outcome = import_in_fresh_process(names, OPTIONAL, tmp_path)["outcome"]
    for name, error in outcome.items():
        if error is not None:
            kinds, text = error
            assert "MissingExtra" in kinds, (name, error)
            assert "safepoint[" in text, f"{name}: no install line in {text!r}"


def test_importing_the_package_loads_nothing_optional(tmp_path):
    loaded = import_in_fresh_process(["safepoint"], frozenset(), tmp_path)["loaded"]
    assert not OPTIONAL.intersection(loaded)
    # The command line's own dependencies are paid for by those who use the command line.
    assert not {"click", "rich"}.intersection(loaded)


@pytest.mark.skipif("safepoint.cli" not in modules(), reason="the command line does not exist yet")
def test_importing_the_command_line_loads_nothing_optional(tmp_path):
    loaded = import_in_fresh_process(["safepoint", "safepoint.cli"], frozenset(), tmp_path)["loaded"]
    # rich looks at attr by itself, to print such objects well.
    assert not (OPTIONAL - {"attr", "attrs"}).intersection(loaded)
