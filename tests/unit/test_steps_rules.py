"""The rules of named steps, against an oracle that knows what each product was really made from."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.rules.steps import FAILED, FALLEN, LOST, MADE, SKIPPED, Action, Book, Made, digest_of
from tests.support.scale import scale

PRINT = b"f" * 16


def made(number: int = 1, needs: dict[str, Any] | None = None, **more: Any) -> Made:
    return Made(more.pop("fingerprint", PRINT), needs or {}, number, b"d" * 16, more.pop("status", MADE), **more)


def chain(**more: Any) -> dict[str, Made]:
    """c was made from b, and b from a."""
    a = made(1, **more)
    b = made(2, {"a": a.version})
    return {"a": a, "b": b, "c": made(3, {"b": b.version})}


def test_what_is_there_and_unchanged_is_used_again() -> None:
    assert Book(chain()).decide("b", PRINT, ["a"]).action is Action.REUSE


@pytest.mark.parametrize(
    ("name", "needs", "fingerprint", "why"),
    [
        ("d", ["a"], PRINT, "it has not been made"),
        ("b", ["a"], b"x" * 16, "its arguments have changed"),
        ("c", ["b", "a"], PRINT, "it needs other products than when it was made"),
    ],
)
def test_it_runs_again_for_a_reason(name: str, needs: list[str], fingerprint: bytes, why: str) -> None:
    decision = Book(chain()).decide(name, fingerprint, needs)
    assert (decision.action, decision.why, decision.lost) == (Action.RUN, why, False)


def test_what_is_lost_runs_again_and_is_known_to_have_run() -> None:
    decision = Book(chain(), ["a"]).decide("a", PRINT, [])
    assert (decision.action, decision.lost) == (Action.RUN, True)


def test_nothing_is_used_that_was_made_from_what_is_lost() -> None:
    book = Book(chain(), ["a"])
    assert [book.decide(n, PRINT, needs).action for n, needs in (("b", ["a"]), ("c", ["b"]))] == [Action.BLOCKED] * 2
    assert [book.standing(n) for n in "abc"] == [LOST, FALLEN, FALLEN]
    assert book.dependants("a") == ("b", "c")


def test_one_made_anew_throws_down_what_was_made_from_it() -> None:
    book = Book(chain() | {"a": made(4)})
    assert book.decide("b", PRINT, ["a"]).why == "'a' has changed"
    assert book.decide("c", PRINT, ["b"]).action is Action.BLOCKED


def test_a_lost_pure_product_is_made_again_only_when_it_is_asked_for() -> None:
    book = Book(chain(pure=True), ["a"])
    assert book.decide("b", PRINT, ["a"]).action is Action.REUSE
    assert book.decide("b", b"x" * 16, ["a"]).action is Action.BLOCKED


def test_one_goes_on_without_a_lost_optional_product() -> None:
    book = Book(chain(optional=True), ["a"])
    assert book.decide("b", PRINT, ["a"]).action is Action.REUSE
    anew = book.decide("b", b"x" * 16, ["a"])
    assert anew.action is Action.RUN
    # What was made without it does not stand once it is there again, not even where it is pure.
    b = made(5, book.versions(["a"]))
    assert Book(chain(optional=True) | {"b": b}, ["a"]).decide("b", PRINT, ["a"]).action is Action.REUSE
    assert Book(chain(optional=True) | {"b": b}).decide("b", PRINT, ["a"]).action is Action.RUN


def test_a_need_that_nothing_is_known_of() -> None:
    decision = Book({}).decide("b", PRINT, ["a"])
    assert (decision.action, decision.need) == (Action.UNKNOWN, "a")


def test_a_circle_is_seen() -> None:
    book = Book(chain())
    assert book.circle("a", ["c"]) == ("a", "c", "b", "a")
    assert book.circle("a", ["a"]) == ("a", "a")
    assert book.circle("d", ["c", "b"]) == ()


def test_an_edited_circle_is_not_sound() -> None:
    assert not Book({"a": made(1, {"b": (1, b"d" * 16)}), "b": made(1, {"a": (1, b"d" * 16)})}).sound("a")


def test_a_number_never_comes_again_even_if_its_record_is_gone() -> None:
    assert Book({"b": made(2, {"a": (7, b"d" * 16)})}).next_number() == 8


@pytest.mark.parametrize("more", [{}, {"pure": True}, {"optional": True, "status": FAILED, "error": "ValueError"}])
def test_a_record_comes_back(more: dict[str, Any]) -> None:
    record = made(3, {"a": (1, b"x" * 16)}, reads=(1, 2), writes=(3,), **more)
    assert Made.decode(record.encode()) == record


@pytest.mark.parametrize(
    "parts",
    [
        None,
        3,
        [],
        "x" * 8,
        [b"", {}, True, b"", "made", [], [[], []], ""],
        [b"", {}, 1, b"", "made", 5, [[], []], ""],
        [b""] * 8,
    ],
)
def test_what_is_no_record_is_none(parts: Any) -> None:
    assert Made.decode(parts) is None


# -- against the oracle


@dataclass
class Step:
    needs: tuple[str, ...]
    pure: bool
    optional: bool
    argument: int = 0
    skip: bool = False


@dataclass
class World:
    """Steps as a program has them. A value tells what it was made from: name, argument, inputs, and for all but pure steps the
    number of the execution."""

    steps: dict[str, Step]
    made: dict[str, Made] = field(default_factory=dict)
    truth: dict[str, Any] = field(default_factory=dict)
    """Each product as it was made; those in ``lost`` no program can see."""
    lost: set[str] = field(default_factory=set)
    ran: int = 0

    def seen(self, name: str) -> Any:
        return None if name in self.lost else self.truth[name]

    def reach(self, name: str) -> Action:
        step = self.steps[name]
        book = Book(self.made, self.lost)
        fingerprint = digest_of(repr((name, step.argument)).encode())
        decision = book.decide(name, fingerprint, step.needs, optional=step.optional, skip=step.skip)
        if decision.action in (Action.UNKNOWN, Action.BLOCKED):
            return decision.action
        if decision.action is Action.REUSE:
            return decision.action
        self.lost.discard(name)
        if decision.action is Action.SKIP:
            self.made[name] = Made(fingerprint, {}, 0, digest_of(b"skipped"), SKIPPED, step.pure, step.optional)
            self.truth[name] = None
            return decision.action
        self.ran += 1
        value = (name, step.argument, tuple(self.seen(n) for n in step.needs), 0 if step.pure else self.ran)
        failed = step.optional and step.argument == 2
        self.made[name] = Made(
            fingerprint,
            book.versions(step.needs),
            0 if step.pure else book.next_number(),
            digest_of(b"failed" if failed else repr(value).encode()),
            FAILED if failed else MADE,
            step.pure,
            step.optional,
        )
        self.truth[name] = None if failed else value
        return decision.action

    def follows(self, name: str) -> None:
        """Say that the product was made from its inputs as they are there, all the way down."""
        step, value = self.steps[name], self.truth[name]
        if value is None:
            return
        for need, had in zip(step.needs, value[2], strict=True):
            assert need not in self.lost or step_may_be_missed(self.steps[need])
            assert had == self.truth[need] or (had is None and need in self.lost and self.steps[need].optional)
            self.follows(need)

    def look(self) -> None:
        """Whatever step the program reached now: what it would be given, or be run on, follows from what is there."""
        book = Book(self.made, self.lost)
        for name, step in self.steps.items():
            fingerprint = digest_of(repr((name, step.argument)).encode())
            action = book.decide(name, fingerprint, step.needs, optional=step.optional).action
            if action is Action.REUSE:
                assert self.truth[name] is None or self.truth[name][1] == step.argument
                assert name not in self.lost
                self.follows(name)
            elif action is Action.RUN:
                for need in step.needs:
                    assert need not in self.lost or self.steps[need].optional
                    self.follows(need)


def step_may_be_missed(step: Step) -> bool:
    return step.pure or step.optional


@st.composite
def worlds(draw: st.DrawFn) -> World:
    steps: dict[str, Step] = {}
    for name in "abcdef"[: draw(st.integers(2, 6))]:
        needs = tuple(n for n in steps if draw(st.booleans()))
        steps[name] = Step(needs, draw(st.booleans()), draw(st.booleans()))
    return World(steps)


@pytest.mark.scaled
@settings(max_examples=scale(300, 3000))
@given(worlds(), st.data())
def test_what_is_used_follows_from_what_is_there(world: World, data: st.DataObject) -> None:
    names = list(world.steps)
    whole_pass(world)
    for _ in range(data.draw(st.integers(1, 20))):
        name = data.draw(st.sampled_from(names))
        what = data.draw(st.sampled_from(["argument", "skip", "lose", "lose", "forget", "reach", "reach"]))
        step = world.steps[name]
        if what == "argument":
            step.argument = data.draw(st.integers(0, 2))
        elif what == "skip":
            step.skip = not step.skip
        elif what == "lose" and name in world.made and world.made[name].status == MADE:
            world.lost.add(name)
        elif what == "forget" and not any(name in other.needs for other in world.steps.values()):
            world.made.pop(name, None)
            world.truth.pop(name, None)
            world.lost.discard(name)
        elif what == "reach":
            world.reach(name)
        world.look()
    whole_pass(world)


def whole_pass(world: World) -> None:
    """Every step in turn: nothing stands in the way, each product is what making all of it anew would give, and a second
    time nothing is done."""
    for name in world.steps:
        assert world.reach(name) in (Action.RUN, Action.REUSE, Action.SKIP)
    assert not world.lost
    for name in world.steps:
        world.follows(name)
        assert Book(world.made).standing(name) in (MADE, FAILED, SKIPPED)
    ran = world.ran
    for name in world.steps:
        world.reach(name)
    assert world.ran == ran
