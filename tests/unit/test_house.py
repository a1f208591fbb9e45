"""The rules of the house: which way imports point, how long a module may be, what must not stand in a tracked file."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT, modules

MODULES = modules()
MOST_LINES = 600

# Bottom to top. What is named nowhere here is a public object: checkpointer, run, agent, aio, the package itself and whatever
# else lies at the top of it.
FLOOR = frozenset({"_version", "_probe", "errors", "model", "rows"})
CORE = frozenset({"codec", "rules", "stores"})
ROOF = frozenset({"__main__", "adapters", "cli", "harness", "testing", "viewer"})

# Neighbours on one level that must not know each other: decisions and encodings stay free of I/O.
FORBIDDEN_NEIGHBOURS = {("rules", "stores"), ("codec", "stores"), ("errors", "model")}


def part(module: str) -> str:
    """Return the first name below the package: "safepoint.stores.url" is in "stores", the package itself in ""."""
    return module.partition(".")[2].partition(".")[0]


def level(module: str) -> int:
    name = part(module)
    if name in FLOOR:
        return 0
    if name in CORE:
        return 1
    return 3 if name in ROOF else 2


def imported(tree: ast.Module, module: str, known: frozenset[str], *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and target of every import from the package: at the top, in functions, for types, and by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".") if is_package else module.split(".")[:-1]
                anchor = anchor[: len(anchor) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            # `from safepoint import errors` takes a module and is an import of it; `from safepoint import save` runs through
            # the package's own namespace, which lower levels must not know.
            for alias in node.names:
                target = f"{base}.{alias.name}"
                yield node.lineno, target if target in known else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def violations(source: str, module: str, known: frozenset[str] = frozenset(MODULES), *, is_package: bool = False) -> list[str]:
    found = []
    for line, target in imported(ast.parse(source), module, known, is_package=is_package):
        if target.partition(".")[0] != "safepoint":
            continue
        if level(target) > level(module) or (part(module), part(target)) in FORBIDDEN_NEIGHBOURS:
            found.append(f"{module}:{line} imports {target}")
    return found


def test_imports_point_down():
    found = []
    for module, path in MODULES.items():
        found += violations(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("safepoint.errors", "from safepoint.codec import values"),
        ("safepoint.errors", "import safepoint.model"),
        ("safepoint.rules.journal", "from safepoint.stores.base import Store"),
        ("safepoint.rules.journal", "from ..stores import base"),
        ("safepoint.codec.values", "def f():\n    from safepoint import stores"),
        ("safepoint.stores.sqlite", "import safepoint.checkpointer"),
        ("safepoint.stores.sqlite", "from safepoint import open"),
        ("safepoint.stores.sqlite", "if TYPE_CHECKING:\n    from safepoint.run import Run"),
        ("safepoint.run", "import importlib\nimportlib.import_module('safepoint.cli')"),
        ("safepoint", "def __getattr__(name):\n    from safepoint.testing import machine"),
    ],
)
def test_an_import_that_points_up_is_seen(module, source):
    known = frozenset({"safepoint", "safepoint.stores", "safepoint.stores.base"})
    assert violations(source, module, known)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("safepoint.rules.journal", "from safepoint.model import State\nfrom safepoint.rules import merge"),
        ("safepoint.stores.sqlite", "from safepoint import errors\nfrom safepoint.codec.chunks import split"),
        ("safepoint.stores.sqlite", "from . import base\nimport safepointed"),
        ("safepoint.cli.main", "import safepoint\nfrom safepoint.rules import retention"),
    ],
)
def test_an_import_that_points_down_is_let_be(module, source):
    known = frozenset({"safepoint", "safepoint.errors", "safepoint.rules.merge", "safepoint.stores", "safepoint.stores.base"})
    assert violations(source, module, known) == []


def test_no_module_is_long():
    long = {module: lines for module, path in MODULES.items() if (lines := len(path.read_bytes().splitlines())) > MOST_LINES}
    assert not long, f"over {MOST_LINES} lines, split by what changes together: {long}"


def test_every_module_says_what_it_is_for():
    silent = [name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not silent, silent


# --- what must not stand in a tracked file ------------------------------------------------------------------------------------
# The patterns are put together from pieces, so that this file may be searched like the others.

UNWANTED = [
    re.compile("|".join(["pypi" + r"\.org", "python" + r"hosted\.org", r"--(?:extra-)?" + "index-url", "/opt/" + "pypi"])),
    # A slash after a word, a dot or a slash belongs to an address or a relative path.
    re.compile(r"(?<![\w./~$}-])/" + r"(?:work|root)/"),
    re.compile(r"(?<![\w./~$}-])/" + r"(?:home|Users)/\w+/"),
    re.compile("/tmp/" + r"[\w./-]*\bvenv\b"),
]


def tracked() -> list[Path]:
    """Return the files under version control, or all of an unpacked source archive."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode == 0:
        files = [ROOT / name for name in git.stdout.split("\0") if name]
    else:
        files = [path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
    return [path for path in files if path.is_file()]


def unwanted_in(text: str) -> list[str]:
    return [found.group() for pattern in UNWANTED for found in pattern.finditer(text)]


def test_no_tracked_file_names_a_registry_or_a_path_of_one_machine():
    found = {}
    for path in tracked():
        content = path.read_bytes()
        if b"\0" not in content and (hits := unwanted_in(content.decode("utf-8", "replace"))):
            found[str(path.relative_to(ROOT))] = sorted(set(hits))
    assert not found, found


def test_unwanted_text_is_seen():
    assert unwanted_in("see https://" + "pypi" + ".org/simple")
    assert unwanted_in("open('/" + "work/main/x')")
    assert unwanted_in("cd /" + "root/x")
    assert unwanted_in("/tmp/" + "x1/venv/bin/python")
    assert not unwanted_in("a path like src/work/x, https://example.com/work/x or /tmp/agent.db")


def test_locked_requirements_carry_hashes():
    lists = sorted(ROOT.glob("requirements*.txt"))
    assert {"requirements.txt", "requirements-dev.txt"} <= {path.name for path in lists}
    for path in lists:
        entries = re.split(r"\n(?=\S)", path.read_text(encoding="utf-8").strip())
        assert entries
        for entry in entries:
            assert re.match(r"[\w.-]+==\S+", entry), (path.name, entry)
            assert "--hash=sha256:" in entry, (path.name, entry)
