"""Each operation of a run, disturbed once in every way: nothing is done twice, lost, held or saved past what is open."""

import logging

import pytest

from tests.integration.conftest import STORES, new_url
from tests.support.children import Server
from tests.support.interrupted import FACES, KINDS, PROGRAMS, REACTIONS, Bench, Case, hooked, storms
from tests.support.scale import SOAK, scale
from tests.support.seeds import fresh_seed

WAYS = [(kind, when, reaction) for kind in KINDS for when in ("instead", "after") for reaction in REACTIONS]
EVERY = 43 if SOAK else 53
"""One of so many cases is played: all of them are 160,000. No divisor of the number of ways, so all ways come round, and a
soak begins each time elsewhere."""


NEAR = ("memory", "sqlite")
"""What a store may do to a run it may do on any: here all is tried. On servers each program has one face, unless in soak."""
CASES = [
    (name, kept, face)
    for i, name in enumerate(PROGRAMS)
    for kept in STORES
    for k, face in enumerate(FACES)
    if kept != "file" and (SOAK or kept in NEAR or (i + STORES.index(kept)) % len(FACES) == k)
]
STORMS = [
    (kept, face)
    for kept in STORES
    for k, face in enumerate(FACES)
    if kept not in {"memory", "file"} and (SOAK or kept in NEAR or k % 3 == STORES.index(kept) % 2)
]


@pytest.mark.scaled
@pytest.mark.parametrize(("name", "kept", "face"), CASES)
def test_an_operation_disturbed(name, kept, face, tmp_path, caplog):
    program = PROGRAMS[name]
    if program.transactional and kept not in {"sqlite", "postgres"}:
        pytest.skip("transactional_tools is False")
    logging.getLogger("safepoint").setLevel(logging.CRITICAL)
    caplog.set_level(logging.CRITICAL)
    bench = Bench(new_url(kept, tmp_path))
    every = EVERY if kept in NEAR else 4 * EVERY + 1
    failures = []
    played = 0
    try:
        with hooked():
            calm = Case(bench, face, program)
            expected = calm.play()
            turn = sum(map(ord, name + kept + face)) + (fresh_seed() % 65536 if SOAK else 0)
            for kind, when, reaction in WAYS:
                if face.endswith("async") and kind == "interrupt":
                    continue  # Ctrl-C reaches a loop's task as a cancellation
                for nth in range(1, calm.operations + 1):
                    turn += 1
                    if turn % every:
                        continue
                    case = Case(bench, face, program, reaction, nth, kind, when, expected)
                    played += 1
                    try:
                        case.play()
                    except Exception as error:
                        failures.append(f"{case}: {type(error).__name__} {error}")
    finally:
        bench.close()
        logging.getLogger("safepoint").setLevel(logging.NOTSET)
    assert not failures, f"{len(failures)} of {played}:\n" + "\n".join(failures[:6])


@pytest.fixture(scope="module")
def server():
    made = Server("safepoint", "safepoint.aio", "tests.support.imports", "tests.support.interrupted")
    yield made
    made.close()


@pytest.mark.scaled
@pytest.mark.parametrize(("kept", "face"), STORMS)
def test_a_storm_of_interrupts(face, kept, server, tmp_path):
    """Ctrl-C for real, wherever it falls, in a process of its own."""
    seed = str(fresh_seed())
    n, failures = server.run(storms, new_url(kept, tmp_path), face, seed, scale(2 if kept == "sqlite" else 1, 3))
    assert not failures, f"seed {seed}, {len(failures)} of {n}:\n" + "\n".join(failures[:6])
