"""Every Python block of the README and the docs is executed, block after block of a page in one namespace."""

import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text(encoding="utf-8"))], ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path):
    # As a module of its own in a process of its own: what a reader would paste, with nothing of ours around it.
    source = "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))
    script = tmp_path / "page.py"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere():
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                missing.append(f"{page.name} -> {target}")
    assert not missing
