"""What the rules of the machine draw from."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["BRANCHES", "CALL_STATUSES", "SPACES", "TASKS", "branches", "contents", "picks", "spaces", "steps", "tasks"]

TASKS = ("task", "it's 100% \N{SNOWMAN}\n../x")
SPACES = ("", "", "", "ns")
BRANCHES = ("main", "main", "side", "a'b")
CALL_STATUSES = ("started", "in_doubt", "paused", "succeeded", "failed")

tasks = st.sampled_from(TASKS)
spaces = st.sampled_from(SPACES)
branches = st.sampled_from(BRANCHES)
picks = st.integers(0, 63)
"""Chooses among what there is, modulo its number: a draw whose range never changes."""
contents = st.sets(st.integers(0, 11), max_size=5)
steps = st.integers(0, 2)
