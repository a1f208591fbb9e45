"""Every Python block of the README and the docs is executed, block after block of a page in one namespace."""

import re
import subprocess
import sys

import pytest

from tests.support import servers
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SERVERS = {
    '"postgresql://agents@db.example.com/agents"': servers.fresh_postgres_url,
    '"redis://cache.example.com/0"': servers.fresh_redis_url,
}
"""What a page calls its server; the one that is there in its place."""


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text(encoding="utf-8"))], ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path):
    # As a module of its own in a process of its own: what a reader would paste, with nothing of ours around it.
    source = "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))
    for named, fresh in SERVERS.items():
        if named in source:
            source = source.replace(named, repr(fresh()))
    assert not re.search(r"(postgresql|redis)://[^\s\"]*example\.com", re.sub(r"#.*", "", source)), "a server that nobody runs"
    script = tmp_path / "page.py"
    script.write_text(source, encoding="utf-8")
    for time in ("first", "second"):  # the second finds what the first has stored
        done = subprocess.run(
            [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{time} time: {done.stderr}"


def test_the_program_of_the_readme_has_twenty_lines_and_strict_types(tmp_path):
    first = BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert first is not None
    lines = [line for line in first[1].splitlines() if line.strip()]
    assert len(lines) <= 22, "twenty of substance, and the imports"
    (tmp_path / "program.py").write_text(first[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def test_links_between_pages_lead_somewhere():
    missing = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]+\.md)?(#[^)]+)?\)", page.read_text(encoding="utf-8")):
            other = page.parent / target if target else page
            if not other.exists():
                missing.append(f"{page.name} -> {target}")
            elif anchor and anchor not in anchors(other):
                missing.append(f"{page.name} -> {target}{anchor}")
    assert not missing
