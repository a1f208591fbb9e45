"""Declaring tools: what is refused, how arguments are bound, what a plain call does where there is no run."""

import gc
import inspect

import pytest

import safepoint
from safepoint import Done, Retry, UsageError, model, tool
from safepoint.tools import tool_named


def declared(fn=None, **options):
    return tool(**options)(fn or (lambda a: a))


# -- declaration


def test_a_tool_is_a_write_unless_it_says_otherwise():
    @tool
    def send(to: str) -> str:
        """Send it."""
        return to

    assert send.effect == "write"
    assert send.name.endswith("test_a_tool_is_a_write_unless_it_says_otherwise.<locals>.send")
    assert send.name.startswith(__name__)
    assert (send.__name__, send.__doc__) == ("send", "Send it.")
    assert str(inspect.signature(send)) == "(to: str) -> str"
    assert "effect=write" in repr(send)


def test_a_model_is_a_read_that_is_recorded_durably():
    @model(name="gpt", retry=Retry(3))
    def ask(messages):
        return messages

    assert (ask.effect, ask.name, ask.policy.model, ask.policy.attempts) == ("read", "gpt", True, 3)


def test_the_policy_says_all_that_a_plan_needs():
    t = declared(
        lambda a, *, idempotency_key: a,
        verify=lambda call: Done(),
        verify_is_final=True,
        receiver_dedups=True,
        settle_after=0.5,
        key=lambda a: a,
        replan="execute",
        retry=Retry(attempts=4),
    )
    p = t.policy
    assert (p.verify, p.final, p.dedups, p.settle, p.key, p.replan, p.attempts) == (True, True, True, 0.5, True, "execute", 4)
    assert declared(effect="idempotent", key_ttl=60).policy.key_ttl == 60


def generator(a):
    yield a


async def coroutine(a):
    return a


async def async_generator(a):
    yield a


@pytest.mark.parametrize(
    ("fn", "options", "says"),
    [
        (None, {"effect": "delete"}, "effect"),
        (None, {"name": " "}, "blank"),
        (None, {"name": "a\0b"}, "NUL"),
        (None, {"replan": "maybe"}, "replan"),
        (None, {"settle_after": -1}, "settle_after"),
        (None, {"effect": "idempotent", "key_ttl": float("nan")}, "key_ttl"),
        (None, {"key_ttl": 5}, "idempotent"),
        (None, {"verify_is_final": True}, "verifier"),
        (None, {"timeout": 3}, "sync"),
        (coroutine, {"timeout": -3}, "timeout"),
        (None, {"effect": "read", "verify": Done}, "write"),
        (None, {"receiver_dedups": True}, "idempotency_key"),
        (coroutine, {"effect": "transactional"}, "sync"),
        (lambda *, connection: 1, {}, "connection"),
        (generator, {"effect": "read"}, "generator"),
        (async_generator, {"effect": "read"}, "generator"),
    ],
)
def test_a_declaration_that_cannot_be_kept_is_refused(fn, options, says):
    with pytest.raises(UsageError, match=says) as caught:
        declared(fn, **options)
    assert caught.value.remedy


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"backoff": -1}, {"max_backoff": -1}])
def test_a_retry_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(UsageError):
        Retry(**wrong)


def test_waits_double_up_to_a_limit():
    retry = Retry(9, backoff=1, max_backoff=5)
    assert [retry.wait(n) for n in (1, 2, 3, 4, 5000)] == [1, 2, 4, 5, 5]


# -- arguments


def everything(a, /, b, c=3, *rest, d, e=5, idempotency_key, fence, **more):
    return (a, b, c, rest, d, e, idempotency_key, fence, more)


def test_arguments_are_bound_with_defaults_and_without_what_the_run_fills_in():
    t = declared(everything)
    assert t.arguments((1, 2), {"d": 4}) == {"a": 1, "b": 2, "c": 3, "rest": (), "d": 4, "e": 5, "more": {}}
    assert t.injects == {"idempotency_key", "fence"}


def test_positional_and_named_arguments_are_the_same_call():
    t = declared(lambda a, b=2: (a, b))
    assert t.arguments((1,), {}) == t.arguments((), {"a": 1}) == t.arguments((1, 2), {}) == t.from_json('{"a": 1}')


def test_binding_can_be_undone():
    t = declared(everything)
    bound = t.arguments((1, 2, 3, 7, 8), {"d": 4, "z": 9})
    args, kwargs = t.invocation(bound, {"idempotency_key": "k", "fence": 2, "connection": "not asked for"})
    assert t.fn(*args, **kwargs) == (1, 2, 3, (7, 8), 4, 5, "k", 2, {"z": 9})


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"nope": 1}), ((1,), {"idempotency_key": "mine"})]
)
def test_arguments_that_do_not_fit_are_refused(args, kwargs):
    t = declared(lambda a, *, idempotency_key: a)
    with pytest.raises(UsageError):
        t.arguments(args, kwargs)


@pytest.mark.parametrize("wrong", ["{", "[1]", "null", 7, None, '{"b": 1}'])
def test_what_a_model_makes_up_is_refused_before_anything_runs(wrong):
    with pytest.raises(UsageError):
        declared(lambda a: a).from_json(wrong)


def test_no_arguments_as_models_write_them():
    assert declared(lambda: 1).from_json("") == {}
    assert declared(lambda: 1).from_json("{}") == {}


def test_the_business_operation_is_made_from_the_arguments_alone():
    t = declared(lambda order, note="", *, idempotency_key: 1, key=lambda order, note: order)
    assert t.operation(t.arguments((7,), {"note": "x"})) == 7
    assert declared().operation({"a": 1}) is None


def test_a_bound_call_shows_no_argument():
    bound = declared(name="t").bind("CANARY")
    assert repr(bound) == "<Bound t>"
    assert bound.arguments == {"a": "CANARY"}
    assert bound.with_id("c1").call_id == "c1"
    with pytest.raises(UsageError):
        declared().bind()


# -- outside of a run


def test_outside_of_a_run_a_tool_is_a_plain_function():
    @tool
    def double(x, *, idempotency_key="none given"):
        return x * 2, idempotency_key

    assert double(4) == (8, "none given")
    assert double.fn(4) == (8, "none given")


def test_an_async_tool_outside_of_a_run_is_a_plain_coroutine_function():
    import asyncio

    @tool
    async def double(x):
        return x * 2

    assert double.is_async
    assert asyncio.run(double(4)) == 8


def test_an_object_that_is_called_can_be_a_tool():
    class Sender:
        async def __call__(self, x):
            return x

    t = declared(Sender(), effect="read")
    assert t.is_async
    assert t.name == f"{__name__}.{Sender.__qualname__}"


def test_tools_are_found_by_name_as_long_as_they_live():
    t = declared(name="found-by-name")
    assert tool_named("found-by-name") is t
    del t
    gc.collect()
    assert tool_named("found-by-name") is None


def test_a_write_past_the_run_that_this_process_holds_is_refused():
    import threading

    sent = []

    @tool
    def send(x):
        sent.append(x)

    @tool(effect="read")
    def look(x):
        return x

    caught = []

    def elsewhere():
        assert look(1) == 1
        send.fn("not part of the run")
        try:
            send("part of it?")
        except UsageError as error:
            caught.append(error)

    with safepoint.open("memory://") as cp, cp.resume("t"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert sent == ["not part of the run"]
    assert "call_id" in caught[0].remedy
    assert "tool.fn" in caught[0].remedy
    send("no run is left")
    assert sent[-1] == "no run is left"
