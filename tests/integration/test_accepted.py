"""Field case 10 (a): a reader that refuses what its own writer has written makes good data look lost."""

import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import safepoint
from safepoint import State
from safepoint.errors import SafepointError
from safepoint.model import KINDS
from tests.integration.conftest import STORES, new_url
from tests.support import samples
from tests.support.scale import scale

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

NAMES = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "\0",
        "a" * 512,
        "a" * 513,
        "é" * 512,
        "..",
        ".",
        "/",
        "a/../b",
        "CON",
        "nul.json",
        "\ud800",
        "~",
        "main~1",
        "\n",
        "a ",
        " a",
    ]
)
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**70, True, 0.0, 1.0])
METADATA = st.one_of(
    st.dictionaries(NAMES, samples.leaves, max_size=3),
    st.sampled_from(
        [{}, {"big": "x" * 8_000}, {"big": "x" * 8_180}, {"big": "x" * 8_300}, {1: 2}, {"": ""}, {"safepoint": {}}]
    ),
)
MESSAGES = st.lists(samples.values, max_size=3) | st.sampled_from(
    [[], [[]], [None] * 300, ["x" * 48] * 40, [{"a": "y" * 17_000}] * 2]
)
STATES = st.fixed_dictionaries(
    {},
    optional={
        "step": NUMBERS,
        "version": NUMBERS,
        "messages": MESSAGES,
        "agent_state": samples.values | samples.arrays | st.dictionaries(NAMES, samples.values, max_size=3),
        "metadata": METADATA,
    },
)
SAVES = st.fixed_dictionaries({}, optional={"label": NAMES, "kind": st.sampled_from(KINDS), "id": NAMES})


# Each example is several durable saves: a smaller one of a failure is not worth the wait for it.
PHASES = (Phase.explicit, Phase.generate)


@pytest.mark.scaled
@pytest.mark.parametrize("store", STORES)
def test_field_case_10a_whatever_save_accepts_load_accepts(store, tmp_path):
    url, accepted = new_url(store, tmp_path), 0

    @settings(max_examples=scale(30, 250), deadline=None, suppress_health_check=list(HealthCheck), database=None, phases=PHASES)
    @example(task="t", branch="main", fields={}, saving={})
    @given(task=NAMES, branch=st.just("main") | NAMES, fields=STATES, saving=SAVES)
    def check(task, branch, fields, saving):
        nonlocal accepted
        if task:  # one that is not there yet, and of a length at the limit if it was
            task = (task[:-32] if len(task) > 500 else task) + uuid.uuid4().hex
        state = State(task, branch=branch, **fields)
        try:
            cp.check_state(state)
            head = cp.save(state, **saving)
        except SafepointError:
            assert state.seq is None
            return
        accepted += 1
        found: list[Any] = [
            cp.load_latest(task),
            cp.load(task, seq=head.seq),
            cp.load(task, branch=branch),
            cp.load(task, id=head.id),
        ]
        with safepoint.open(url, types=samples.CLASSES) as again:
            found.append(again.load_latest(task))
            assert [c.problem for c in again.list_checkpoints(task, check=True)] == [None]
        for one in found:
            assert one is not None
            for part in ("messages", "agent_state", "metadata", "step"):
                out, put = getattr(one, part), getattr(state, part)
                assert samples.same(out, put), f"{part}: {out!r:.500} was {put!r:.500}"
        assert (found[0].seq, found[0].branch, found[0].task_id) == (head.seq, branch, task)
        assert task in [info.task_id for info in cp.tasks()]
        assert cp.raw(task)["problems"] == []
        found[0].messages.append("and on")
        assert cp.save(found[0]).parent_seq == head.seq

    with safepoint.open(url, types=samples.CLASSES) as cp:
        check()
    assert accepted > scale(0, 10)
