"""The application's classes have changed since a state was saved: what loads, what is refused and how, and what stays readable."""

import json
from dataclasses import dataclass, field, make_dataclass
from enum import Enum, Flag, IntEnum, IntFlag, StrEnum
from typing import Any

import attrs
import msgspec
import pytest
from pydantic import BaseModel, Field, create_model

import safepoint
from safepoint import MissingMember, State, plain, tool
from safepoint.cli import main
from safepoint.codec.salvage import salvaged
from safepoint.errors import Damaged, InvalidState, NewerSchema, RefusedType, SafepointError, UsageError
from safepoint.plain import Tagged

_create_model: Any = create_model


def app(cls: Any, name: str) -> Any:
    """As if the class had been imported from the module ``app``, in this or in another version."""
    cls.__module__, cls.__qualname__, cls.__name__ = "app", name, name
    return cls


def saved(url: str, *values: Any, types: Any = (), **options: Any) -> None:
    """One checkpoint per value."""
    with safepoint.open(url, types=types, **options) as cp:
        for value in values:
            state: Any = cp.load_latest("t") or State("t")
            state.agent_state = {"v": value, "other": len(state.messages)}
            state.messages.append({"role": "user", "content": f"message {len(state.messages)}"})
            state.step += 1
            cp.save(state)


# Migrations


def to_2(tree: Any) -> Any:
    tree["agent_state"]["v"] += 10
    return tree


def to_3(tree: Any) -> Any:
    tree["agent_state"]["v"] = [tree["agent_state"]["v"]]
    return tree


def test_a_chain_of_migrations(url):
    saved(url, 1)
    with safepoint.open(url, schema_version=3, migrations={1: to_2, 2: to_3}) as cp:
        state: Any = cp.load_latest("t")
        assert (state.agent_state["v"], state.version) == ([11], 3)
        assert cp.list_checkpoints("t")[0].schema_version == 1, "and the original as it was"
        state.step += 1
        assert cp.save(state).schema_version == 3
        assert cp.load_latest("t").agent_state["v"] == [11]
        assert cp.load("t", seq=1).agent_state["v"] == [11]
    with safepoint.open(url) as cp:
        assert cp.load("t", seq=1).agent_state["v"] == 1
        with pytest.raises(NewerSchema, match="t@2 has schema 3"):
            cp.load_latest("t")
        assert [(c.seq, c.problem and c.problem[:11]) for c in cp.list_checkpoints("t", check=True)] == [
            (2, "NewerSchema"),
            (1, None),
        ]


def test_a_missing_link_is_named(url):
    saved(url, 1)
    with safepoint.open(url, schema_version=3, migrations={1: to_2}) as cp:
        with pytest.raises(InvalidState, match=r"t@1 has schema 1, and no migration leads from 2 to 3") as caught:
            cp.load_latest("t")
        assert "migrations={2: function}" in str(caught.value)


def test_a_migration_that_fails_half_way(url):
    saved(url, 1, "secret", 3)

    def half(tree: Any) -> Any:
        tree["messages"].clear()
        tree["agent_state"]["v"] += 1  # raises for the second checkpoint
        return tree

    with safepoint.open(url, schema_version=3, migrations={1: to_2, 2: half}) as cp:
        assert [cp.load("t", seq=seq).agent_state["v"] for seq in (1, 3)] == [12, 14]
    with safepoint.open(url, schema_version=2, migrations={1: half}) as cp:
        with pytest.raises(InvalidState, match=r"the migration 1 -> 2 of t@2 has failed") as caught:
            cp.load("t", seq=2)
        assert isinstance(caught.value.__cause__, TypeError)
        assert "TypeError" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert (caught.value.details["task"], caught.value.details["seq"]) == ("t", 2)
        assert [c.problem is None for c in cp.list_checkpoints("t", check=True)] == [True, False, True]
    with safepoint.open(url) as cp:
        assert cp.load("t", seq=2).messages == [{"role": "user", "content": f"message {n}"} for n in (0, 1)]


def nothing(tree: Any) -> Any:
    pass


async def coroutine(tree: Any) -> Any:
    return tree


def without_messages(tree: Any) -> Any:
    return {key: tree[key] for key in tree if key != "messages"}


@pytest.mark.parametrize(
    ("migration", "said"),
    [
        (nothing, "it returned None, not the tree"),
        (coroutine, "it returned a coroutine"),
        (without_messages, "has no part 'messages'"),
        (lambda tree: {**tree, "step": "one"}, "'step' of the tree that it returned is a str"),
        (lambda tree: {**tree, "step": -1}, "'step' of the tree that it returned is no number of a step"),
        (lambda tree: {**tree, "step": 2**63}, "'step' of the tree that it returned is no number of a step"),
        (lambda tree: {**tree, "memory": 1}, "has a part 'memory', which no state has"),
        (lambda tree: {**tree, "agent_state": {"v": object()}}, "cannot be stored"),
        (lambda tree: {**tree, "agent_state": Tagged("dataclas", "app:Plan", {})}, "dataclas"),
        (lambda tree: {**tree, "agent_state": Tagged("range", None, [1])}, "cannot be loaded"),
        (lambda tree: {**tree, "agent_state": Tagged("dataclass", "app:Plan", {})}, "neither registered nor trusted"),
    ],
)
def test_what_a_migration_returns_must_be_a_state(url, migration, said):
    saved(url, "secret")
    with safepoint.open(url, schema_version=2, migrations={1: migration}) as cp:
        with pytest.raises(SafepointError) as caught:
            cp.load_latest("t")
        assert said in str(caught.value)
        assert "t@1" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert not isinstance(caught.value, Damaged)


def test_a_migration_may_do_what_it_likes_to_its_tree(url):
    kept: list[Any] = []

    def keeps(tree: Any) -> Any:
        kept.append(tree)
        return to_2(tree)

    saved(url, 1)
    with safepoint.open(url, schema_version=2, migrations={1: keeps}) as cp:
        state = cp.load_latest("t")
        kept[0]["messages"].clear()
        kept[0]["agent_state"].clear()
        assert (state.agent_state["v"], len(state.messages)) == (11, 1)
        assert cp.load_latest("t").agent_state["v"] == 11
        assert kept[1] is not kept[0]


# Classes


def version(name: str, **fields: Any) -> Any:
    return app(make_dataclass(name, [(k, Any) if v is ... else (k, Any, v) for k, v in fields.items()]), name)


def test_a_renamed_class_has_its_old_name_as_an_alias(url):
    plan = version("Plan", goal=...)
    saved(url, plan("g"), types=[plan])
    later = version("Project", goal=...)
    with safepoint.open(url) as cp:
        with pytest.raises(RefusedType, match=r"t@1: agent_state\['v'\].*app:Plan"):
            cp.load_latest("t")
        cp.registry.add(later, aliases=["app:Plan"])
        state: Any = cp.load_latest("t")
        assert type(state.agent_state["v"]) is later
        state.step += 1
        cp.save(state)
        assert cp.raw("t")["state"]["agent_state"]["v"]["class"] == "app:Project"


def test_a_removed_class_blocks_nothing_but_itself(url):
    plan = version("Plan", goal=...)
    saved(url, 1, plan("g"), 3, types=[plan])
    with safepoint.open(url) as cp:
        with pytest.raises(RefusedType, match="app:Plan"):
            cp.load("t", seq=2)
        assert [cp.load("t", seq=seq).agent_state["v"] for seq in (1, 3)] == [1, 3]
        flagged = cp.list_checkpoints("t", check=True)
        assert [c.seq for c in flagged if c.problem] == [2]
        assert "app:Plan" in (flagged[1].problem or "")
        assert all(c.problem is None for c in cp.list_checkpoints("t"))
        assert cp.raw("t", seq=2)["state"]["agent_state"]["v"] == {
            "$type": "dataclass",
            "class": "app:Plan",
            "value": {"goal": "g"},
        }


def of(value: Any) -> Any:
    return lambda: value


def changed(kind: str, first: bool, **fields: Any) -> Any:
    """A class of each library, with a required field ``x``, and more in the later version."""
    if kind == "dataclass":
        return version("Thing", x=..., **{k: ... if v is ... else field(default_factory=of(v)) for k, v in fields.items()})
    if kind == "attrs":
        made = {
            "x": attrs.field(),
            **{k: attrs.field() if v is ... else attrs.field(factory=of(v)) for k, v in fields.items()},
        }
        return app(attrs.make_class("Thing", made), "Thing")
    if kind == "struct":
        return app(msgspec.defstruct("Thing", ["x", *[k if v is ... else (k, Any, v) for k, v in fields.items()]]), "Thing")
    return app(_create_model("Thing", x=(Any, ...), **{k: (Any, v) for k, v in fields.items()}), "Thing")


@pytest.mark.parametrize("kind", ["dataclass", "attrs", "struct", "pydantic"])
def test_fields_that_came_and_went(url, kind):
    old = changed(kind, True, y=...)
    saved(url, old(x=1, y=2), types=[old])
    with safepoint.open(url, types=[changed(kind, False, y=..., z=5)]) as cp:
        thing = cp.load_latest("t").agent_state["v"]
        assert (thing.x, thing.y, thing.z) == (1, 2, 5), "a default is used where there is one"
    with safepoint.open(url, types=[changed(kind, False, y=..., z=...)]) as cp:
        with pytest.raises(InvalidState) as caught:
            cp.load_latest("t")
        for part in ("t@1", "agent_state['v']", "app.Thing.z", "default", "migration"):
            assert part in str(caught.value)
    gone = r"t@1: agent_state\['v'\].*app.Thing has no field 'y' any more"
    with safepoint.open(url, types=[changed(kind, False)]) as cp, pytest.raises(InvalidState, match=gone):
        cp.load_latest("t")

    def to_2(tree: Any) -> Any:
        def fix(thing: Tagged) -> None:
            plain.rename(thing, "y", "w")
            plain.drop(thing, "x")
            thing.value["x"] = "new"

        return plain.change(tree, "app:Thing", fix)

    with safepoint.open(url, types=[changed(kind, False, w=...)], schema_version=2, migrations={1: to_2}) as cp:
        thing = cp.load_latest("t").agent_state["v"]
        assert (thing.x, thing.w, hasattr(thing, "y")) == ("new", 2, False)
        if kind == "pydantic":
            assert thing.model_fields_set == {"w"}


def test_helpers_of_migrations_refuse_what_they_cannot_do():
    with pytest.raises(UsageError, match="already"):
        plain.rename(Tagged("dataclass", "a:B", {"x": 1, "-y": None}), "x", "y")
    with pytest.raises(UsageError, match="no fields"):
        plain.drop(Tagged("enum", "a:B", "RED"), "x")
    tree = {"a": [Tagged("tuple", None, [Tagged("enum", "a:B", "RED")])]}
    assert plain.change(tree, "a:B", lambda v: v.value) is tree
    assert tree == {"a": [Tagged("tuple", None, ["RED"])]}
    assert plain.change(Tagged("enum", "a:B", "RED"), "a:B", lambda v: 5) == 5


# Members


def color(base: Any = Enum, **members: Any) -> Any:
    return app(base("Color", members), "Color")


def test_field_case_22_a_renamed_and_a_removed_member(url):
    old = color(RED=1, OLD=2, GONE=3)
    saved(url, old.RED, old.OLD, {old.GONE: [old.RED]}, types=[old])
    new = color(RED=2, NEW=1)  # the values have changed places too
    with safepoint.open(url, types=[new]) as cp:
        assert cp.load("t", seq=1).agent_state["v"] is new.RED, "by name, never by value"
        for seq, member in ((2, "OLD"), (3, "GONE")):
            with pytest.raises(InvalidState) as caught:
                cp.load("t", seq=seq)
            for part in (f"t@{seq}", "agent_state['v']", "app.Color", member, "missing="):
                assert part in str(caught.value)
        assert [c.seq for c in cp.list_checkpoints("t", check=True) if c.problem] == [3, 2]
        assert cp.raw("t", seq=2)["state"]["agent_state"]["v"] == {"$type": "enum", "class": "app:Color", "value": "OLD"}
    with safepoint.open(url) as cp:
        cp.registry.add(new, missing={"OLD": "NEW", "GONE": new.RED})
        assert cp.load("t", seq=2).agent_state["v"] is new.NEW
        assert cp.load("t", seq=3).agent_state["v"] == {new.RED: [new.RED]}
    with safepoint.open(url) as cp:
        cp.registry.add(new, missing={"OLD": "NEW"})
        with pytest.raises(InvalidState, match="GONE"):
            cp.load("t", seq=3)
    with safepoint.open(url) as cp:
        cp.registry.add(new, missing=new.NEW)
        assert cp.load("t", seq=3).agent_state["v"] == {new.NEW: [new.RED]}
    with safepoint.open(url) as cp:
        cp.registry.add(new, missing={"OLD": new.NEW}.get)
        assert cp.load("t", seq=2).agent_state["v"] is new.NEW
        with pytest.raises(InvalidState, match="GONE"):
            cp.load("t", seq=3)
    with safepoint.open(url) as cp:
        cp.registry.add(new, missing=lambda name: 1 / 0)
        with pytest.raises(InvalidState, match=r"policy for missing members of app.Color failed with ZeroDivisionError"):
            cp.load("t", seq=3)


@pytest.mark.parametrize("base", [Enum, IntEnum, StrEnum, Flag, IntFlag])
def test_field_case_22_a_placeholder_is_saved_as_what_it_was(url, base):
    text = base is StrEnum
    old = color(base, RED="r" if text else 1, OLD="o" if text else 2)
    saved(url, [old.OLD, {old.OLD: old.RED}], types=[old])
    new = color(base, RED="r" if text else 1)
    with safepoint.open(url) as cp:
        cp.registry.add(new, missing="placeholder")
        state: Any = cp.load_latest("t")
        first, by_key = state.agent_state["v"]
        assert repr(first) == "<Color.OLD missing>"
        assert (first == MissingMember(new, "OLD"), hash(first) == hash(MissingMember(new, "OLD"))) == (True, True)
        assert first not in (new.RED, "OLD", "o", 2, None)
        assert by_key[first] is new.RED
        state.step += 1
        head = cp.save(state)
        assert cp.load("t", seq=2).agent_state["v"] == [first, {first: new.RED}]
        assert cp.raw("t")["state"]["agent_state"] == cp.raw("t", seq=1)["state"]["agent_state"]
        assert head.seq == 2
    with safepoint.open(url, types=[old]) as cp:
        assert cp.load_latest("t").agent_state["v"] == [old.OLD, {old.OLD: old.RED}], "back again, with the member"


@pytest.mark.parametrize("base", [Flag, IntFlag])
def test_field_case_22_flags_with_bits_that_are_gone(url, base):
    old = color(base, R=1, W=2, X=4)
    saved(url, old.R | old.X, types=[old])
    new = color(base, R=1, W=2)
    with safepoint.open(url, types=[new]) as cp:
        if base is IntFlag:  # keeps bits that have no name, as it does everywhere
            assert cp.load_latest("t").agent_state["v"].value == 5
            return
        with pytest.raises(InvalidState, match=r"app.Color has no member 5"):
            cp.load_latest("t")
        cp.registry.add(new, missing={5: "R"})
        assert cp.load_latest("t").agent_state["v"] is new.R
        cp.registry.add(new, missing="placeholder")
        assert repr(cp.load_latest("t").agent_state["v"]) == "<Color.5 missing>"
        cp.registry.add(new, missing=lambda bits: new(bits & 3))
        assert cp.load_latest("t").agent_state["v"] is new.R


def test_why_a_checkpoint_is_passed_over_is_the_member_that_is_gone(url, caplog):
    old = color(CRIMSON=1, RED=2)
    with safepoint.open(url, types=[old]) as cp:
        state = State("t")
        cp.save(state)
        state.agent_state["v"] = old.CRIMSON
        cp.save(state)
    with safepoint.open(url, types=[color(RED=2)]) as cp:
        why = "invalid: app.Color has no member CRIMSON any more"
        assert cp.plan("t").skipped == ((2, why),)
        with caplog.at_level("INFO", logger="safepoint"), cp.resume("t") as run:
            assert run.recovery.skipped == ((2, why),)
        assert why in caplog.text


def test_members_that_have_become_one_are_no_damage(url):
    old = color(A=1, B=2)
    saved(url, {old.A: "a", old.B: "b"}, {old.A, old.B}, types=[old])
    with safepoint.open(url, types=[color(A=1, B=1)]) as cp:
        for seq, what in ((1, "keys"), (2, "members")):
            with pytest.raises(InvalidState, match=f"two of its {what} are equal now"):
                cp.load("t", seq=seq)


@pytest.mark.parametrize(
    ("cls", "missing"),
    [
        (color(A=1), "something"),
        (color(A=1), "A"),
        (color(A=1), {"OLD": "B"}),
        (color(A=1), {"OLD": 5}),
        (color(A=1), color(A=1).A),
        (version("Plan", goal=...), "placeholder"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_at_once(cls, missing):
    with pytest.raises(UsageError, match=r"register\(missing=\)"):
        safepoint.register(cls, missing=missing)


def test_a_policy_is_given_where_the_enum_is_declared():
    @safepoint.register(name="test_schema_change:Zero", missing={"OLD": "NONE"})
    class Zero(IntEnum):
        NONE = 0

    @safepoint.register(name="test_schema_change:Falsy", missing=Zero.NONE if False else "placeholder")
    class Falsy(IntEnum):
        NONE = 0

    with safepoint.open() as cp:
        assert cp.registry.missing_of(Zero) == {"OLD": "NONE"}
        cp.registry.add(Falsy, missing=Falsy.NONE)
        assert cp.registry.missing_of(Falsy) is Falsy.NONE


# state_type


class Job(BaseModel):
    goal: str
    tries: int = Field(default=0, ge=0, alias="numberOfTries")
    steps: list["Part"] = []


class Part(BaseModel):
    n: int = 1


class Record(msgspec.Struct, rename="camel", tag="record", kw_only=True):
    the_goal: str
    inner: "Record | None" = None
    note: str | msgspec.UnsetType = msgspec.UNSET


@attrs.define(on_setattr=[])
class Cut:
    goal: str = attrs.field(validator=attrs.validators.instance_of(str))


def good(kind: str) -> Any:
    if kind == "pydantic":
        return Job(goal="g", numberOfTries=1, steps=[Part()])
    return Record(the_goal="g", inner=Record(the_goal="h")) if kind == "struct" else Cut("g")


def spoiled(kind: str, value: Any) -> str:
    """Break the state where nothing checks it; the path that the error must name."""
    if kind == "pydantic":
        value.steps[0].n = "SECRET"
        return "agent_state.steps[0].n"
    if kind == "struct":
        value.inner.the_goal = ["SECRET"]
        return "agent_state.inner.the_goal"
    value.goal = ["SECRET"]
    return "agent_state.goal"


@dataclass(slots=True)
class Above:
    part: Part


@dataclass(slots=True)
class Below(Above):
    n: int = 0


def test_what_is_in_the_slots_of_a_class_above_is_looked_at(url):
    with safepoint.open(url, types=[Below, Part], state_type=Below) as cp:
        state = State("t", agent_state=Below(Part()))
        cp.save(state)
        state.agent_state.part.n = "SECRET"
        with pytest.raises(InvalidState, match=r"agent_state\.part\.n does not fit"):
            cp.save(state)


@pytest.mark.parametrize("kind", ["pydantic", "struct", "attrs"])
def test_field_case_32_a_state_that_breaks_its_schema_is_refused_at_save(url, kind):
    types = [Job, Part, Record, Cut]
    cls = type(good(kind))
    with safepoint.open(url, types=types, state_type=cls) as cp:
        state = State("t", agent_state=good(kind))
        cp.check_state(state)
        first = cp.save(state)
        path = spoiled(kind, state.agent_state)
        state.step += 1
        for verb in (cp.save, cp.check_state):
            with pytest.raises(InvalidState) as caught:
                verb(state)
            assert str(caught.value).startswith(f"{path} does not fit state_type={cls.__name__}")
            assert "SECRET" not in str(caught.value)
        assert [c.seq for c in cp.list_checkpoints("t")] == [1]
        assert cp.load_latest("t").agent_state == good(kind)
        assert cp.list_checkpoints("t")[0].digest == first.digest
        others: list[Any] = [{}, None, version("Plan", goal=...)("g")]
        for other in others:
            with pytest.raises(InvalidState, match=r"agent_state does not fit state_type=.*it is of type"):
                cp.save(State("t2", agent_state=other))

        def step(run: Any) -> None:
            spoiled(kind, run.state.agent_state)

        with pytest.raises(InvalidState, match="does not fit"):
            safepoint.run_agent(step, task_id="t", store=cp)
        assert cp.load_latest("t").agent_state == good(kind)


@pytest.mark.parametrize("kind", ["pydantic", "struct", "attrs"])
def test_field_case_32_one_bad_version_blocks_no_other(url, kind):
    """The schema is tightened, and version 4 of five is no longer valid."""

    def make(tight: bool) -> Any:
        if kind == "pydantic":
            return app(create_model("Thing", n=(int, Field(le=3 if tight else 9))), "Thing")
        if kind == "struct":
            return app(msgspec.defstruct("Thing", [("n", int if tight else int | str)]), "Thing")
        limit = attrs.validators.le(3 if tight else 9)
        return app(attrs.make_class("Thing", {"n": attrs.field(validator=limit)}), "Thing")

    bad: Any = "4" if kind == "struct" else 4
    loose = make(False)
    with safepoint.open(url, types=[loose], state_type=loose) as cp:
        state = State("t", agent_state=loose(n=1))
        for n in (1, 2, 3, bad, 3):
            state.agent_state.n = n
            state.step += 1
            cp.save(state)
    tight = make(True)
    with safepoint.open(url, types=[tight], state_type=tight) as cp:
        assert [c.seq for c in cp.list_checkpoints("t")] == [5, 4, 3, 2, 1]
        assert [c.seq for c in cp.list_checkpoints("t", check=True) if c.problem] == [4]
        assert [cp.load("t", seq=seq).agent_state.n for seq in (3, 5)] == [3, 3]
        with pytest.raises(InvalidState, match=r"t@4: agent_state.n does not fit state_type=Thing"):
            cp.load("t", seq=4)
        assert cp.raw("t", seq=4)["state"]["agent_state"]["value"]["n"] == bad


# Journal rows


def test_a_result_of_a_class_that_is_gone_is_refused_for_that_call_alone(url):
    plan = version("Plan", goal=...)
    results: list[Any] = ["plain", plan("g"), "plain too"]
    served: list[Any] = []

    @tool(name="schema.look", effect="read")
    def look(what: str) -> Any:
        return results.pop(0)

    def step(run: Any) -> None:
        for what in ("first", "second", "third"):
            try:
                served.append(run.call(look, what))
            except RefusedType as error:
                served.append(error)
        if not results and len(served) == 3:
            raise KeyboardInterrupt
        run.finish("done")

    with safepoint.open(url, types=[plan]) as cp, pytest.raises(KeyboardInterrupt):
        safepoint.run_agent(step, task_id="t", input="go", store=cp)
    with safepoint.open(url) as cp:  # the class is gone
        assert [c.status for c in cp.calls("t")] == ["succeeded"] * 3
        assert cp.calls("t")[1].result["class"] == "app:Plan"
        assert cp.plan("t").does == "carry on"
        served.clear()
        served.append("so that it is finished")
        assert safepoint.run_agent(step, task_id="t", store=cp).status == "finished"
    assert [served[1], served[3]] == ["plain", "plain too"]
    assert isinstance(served[2], RefusedType)
    assert "app:Plan" in str(served[2])


def test_an_argument_of_a_class_that_is_gone_keeps_no_run_from_going_on(url):
    plan = version("Plan", goal=...)
    called: list[Any] = []

    @tool(name="schema.give", effect="read")
    def give(what: Any) -> str:
        called.append(what)
        if len(called) == 2:
            raise KeyboardInterrupt
        return "given"

    def step(run: Any) -> None:
        run.call(give, "first")
        run.call(give, plan("g") if len(called) < 2 else "another")
        run.finish("done")

    with safepoint.open(url, types=[plan]) as cp, pytest.raises(KeyboardInterrupt):
        safepoint.run_agent(step, task_id="t", input="go", store=cp)
    with safepoint.open(url) as cp:
        assert cp.plan("t").does == "carry on"
        assert safepoint.run_agent(step, task_id="t", store=cp).status == "finished"
    assert called[::2] == ["first", "another"]


# Raw


def test_raw_reads_what_no_class_is_needed_for(url):
    plan = version("Plan", goal=...)
    saved(url, plan((1,)), 2, types=[plan], schema_version=7)
    with safepoint.open(url) as cp:
        raw = cp.raw("t", seq=1)
        assert json.loads(json.dumps(raw, allow_nan=False)) == raw
        assert raw["problems"] == []
        assert raw["checkpoint"]["schema_version"] == 7
        assert raw["state"]["messages"] == [{"role": "user", "content": "message 0"}]
        assert raw["state"]["agent_state"]["v"]["value"] == {"goal": {"$type": "tuple", "value": [1]}}
        assert cp.raw("t")["checkpoint"]["seq"] == 2
        assert (
            cp.raw("t", branch="main")["checkpoint"]["id"] == cp.raw("t", id=cp.list_checkpoints("t")[0].id)["checkpoint"]["id"]
        )
        for wrong in ({"seq": 9}, {"branch": "none"}, {"id": "none"}):
            with pytest.raises(safepoint.NotFound):
                cp.raw("t", **wrong)
        with pytest.raises(safepoint.NotFound):
            cp.raw("nobody")
        with pytest.raises(UsageError):
            cp.raw("t", seq=1, branch="main")


def test_raw_marks_what_is_lost(sqlite):
    state = State("t", messages=[{"role": "user", "content": f"{n} " + "x" * 400} for n in range(200)])
    state.agent_state = {"big": "y" * 1000, "$odd": 1, "list": ["z" * 600]}
    sqlite.save(state)
    row, objects = sqlite.store.read("t", seq=1)
    whole = sqlite.raw("t")
    lost_somewhere = 0
    for name in list(objects)[::3]:
        for instead in ({}, {name: objects[name]._replace(data=b"v\xc0")}):
            tree, problems = salvaged(row.root, row.refs, {**{k: v for k, v in objects.items() if k != name}, **instead})
            assert problems
            assert name.hex() in problems[0]
            text = json.dumps(safepoint.codec.to_json(tree))
            assert "$lost" in text
            lost_somewhere += 1
            kept = sum(f'"{n} xxx' in text for n in range(80))
            assert kept >= 40 or "messages" in problems[0].partition(":")[0]
    assert lost_somewhere > 50
    assert "$lost" not in json.dumps(whole)


def test_show_raw(url, tmp_path, capsys):
    plan = version("Plan", goal=...)
    path = f"sqlite:///{tmp_path}/shown.db"
    saved(path, plan("g"), types=[plan], schema_version=3)
    assert main(["show", "t", "--raw", "--store", path]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["state"]["agent_state"]["v"]["class"] == "app:Plan"
