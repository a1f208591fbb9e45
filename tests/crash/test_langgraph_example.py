"""The example of the LangGraph page, killed again and again while it works."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.scale import scale

AGENT = ROOT / "examples" / "langgraph_agent" / "agent.py"


@pytest.mark.scaled
def test_the_example_places_each_order_once(tmp_path: Path) -> None:
    for _ in range(scale(1, 5)):
        folder = tmp_path / os.urandom(4).hex()
        folder.mkdir()
        kills = 0
        while True:
            process = subprocess.Popen(
                [sys.executable, AGENT], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            begun = time.monotonic()
            orders = folder / "orders.jsonl"
            # Once it works: its imports take longer than its work.
            while process.poll() is None and not (folder / "requests.jsonl").exists() and time.monotonic() - begun < 60:
                time.sleep(0.01)
            if kills < 4:
                time.sleep(random.random() * 0.4)
                process.send_signal(signal.SIGKILL)
                kills += 1
            out, err = process.communicate(timeout=60)
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, err
        assert out == "ordered lamp, cable, desk, chair\n"
        placed = [json.loads(line)["item"] for line in orders.read_text(encoding="utf-8").splitlines()]
        assert placed == ["lamp", "cable", "desk", "chair"]
        asked = [json.loads(line)["messages"] for line in (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
        # A reply that was on its way at a kill is asked for again, and none that was on record.
        assert set(asked) == {1, 4, 7, 10, 13}
        assert len(asked) <= 5 + kills
