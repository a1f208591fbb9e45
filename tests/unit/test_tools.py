"""Declaring tools: what is refused, how arguments are bound, what a plain call does where there is no run."""

import gc
import importlib
import inspect
from datetime import timedelta
from typing import Any

import pytest

import safepoint
from safepoint import Done, Retry, UsageError, model, tool, tools
from safepoint.tools import sole, tool_named

CANARY = "c4n4ry"


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
    assert (vars(send)["__name__"], send.__doc__) == ("send", "Send it.")
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
        (lambda x: 1, {"effect": "transactional"}, "connection"),
        (lambda connection: 1, {"effect": "transactional"}, "keyword-only"),
        (lambda self, x: 1, {}, "method"),
        (lambda cls: 1, {"effect": "read"}, "method"),
        (classmethod(lambda cls: 1), {}, "class"),
        (None, {"name": ""}, "blank"),
        (None, {"name": 7}, "text"),
        (None, {"verify": Done()}, "verify"),
        (None, {"verify": lambda: 1}, "verify"),
        (None, {"verify": lambda call, more: Done()}, "verify"),
        (None, {"key": "order"}, "key"),
        (None, {"retry": 3}, "Retry"),
        (None, {"settle_after": None}, "settle_after"),
        (None, {"settle_after": float("inf")}, "settle_after"),
        (None, {"settle_after": True}, "settle_after"),
        (None, {"effect": "idempotent", "key_ttl": timedelta(days=1)}, "timedelta"),
        (coroutine, {"timeout": "3"}, "timeout"),
        (None, {"failed_on": "TimeoutError"}, "failed_on"),
        (None, {"failed_on": (TimeoutError, 7)}, "failed_on"),
        (None, {"failed_on": int}, "failed_on"),
        (None, {"failed_on": 7}, "failed_on"),
        (None, {"effekt": "read"}, "effect="),
        (None, {"verifier": Done}, "verify="),
        (model(name="declared-once")(lambda a: a), {}, "already"),
        (dict, {"effect": "read"}, "parameters cannot be read"),
        ("write", {}, "effect='write'"),
        (7, {}, "int"),
        (generator, {"effect": "read"}, "generator"),
        (async_generator, {"effect": "read"}, "generator"),
    ],
)
def test_a_declaration_that_cannot_be_kept_is_refused(fn, options, says):
    with pytest.raises(UsageError, match=says) as caught:
        declared(fn, **options)
    assert caught.value.remedy
    assert CANARY not in str(caught.value)


def test_what_can_be_found_wrong_without_the_function_is_found_at_once():
    declare: Any = tool
    declare_model: Any = model
    for wrong in ({"effekt": "read"}, {"retry": 3}, {"failed_on": "x"}):
        with pytest.raises(UsageError, match=r"tool\(\)|failed_on"):
            declare(**wrong)
    with pytest.raises(UsageError, match=r"tool\(effect='read'\)"):
        declare("read")
    for no_option in ({"effect": "write"}, {"verify": Done}, {"nam": "x"}):
        with pytest.raises(UsageError, match=r"model\(\) has no option .* name, retry, timeout"):
            declare_model(**no_option)


def test_a_verifier_is_any_callable_that_takes_a_call():
    class Asks:
        def __call__(self, call):
            return Done()

        def asks(self, call, deep=False):
            return Done()

    async def later(call):
        return Done()

    for verify in (Asks(), Asks().asks, later, lambda *calls: Done(), Done):
        assert declared(verify=verify).policy.verify


def test_failed_on_and_the_retries_take_one_class_or_several():
    assert declared(failed_on=TimeoutError).failed_on == (TimeoutError,)
    assert declared(failed_on=[TimeoutError, OSError]).failed_on == (TimeoutError, OSError)
    assert Retry(2, on=OSError) == Retry(2, on=(OSError,))


def test_a_static_method_and_a_bound_method_are_functions():
    class Post:
        @tool(name="static-send", effect="read")
        @staticmethod
        async def static(x):
            return x

        def send(self, x):
            return x

    assert Post.static.is_async
    assert tool(name="bound-send")(Post().send).fn(3) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0}, {"attempts": "3"}, {"attempts": 2.0}, {"attempts": True}, {"backoff": -1}, {"backoff": None},
        {"max_backoff": -1}, {"backoff": float("nan")}, {"max_backoff": float("inf")}, {"on": "OSError"}, {"on": (int,)}, {"on": 3},
    ],
)  # fmt: skip
def test_a_retry_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(UsageError, match=rf"Retry\(.*{next(iter(wrong))}"):
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


def test_what_does_not_fit_is_named():
    t = declared(lambda a, b=2, *, idempotency_key: a, name="fits")
    with pytest.raises(UsageError, match=r"no parameter 'xx'; it takes a, b") as caught:
        t.arguments((), {"xx": CANARY})
    assert CANARY not in str(caught.value)
    with pytest.raises(UsageError, match=r"missing .*'a'.* it takes a, b"):
        t.arguments((), {"b": 1})
    with pytest.raises(UsageError, match="no parameter 'b', 'c'; it takes no arguments"):
        declared(lambda: 1).arguments((), {"b": 1, "c": 2})
    with pytest.raises(UsageError, match=r"only if it is keyword-only: def f\(…, \*, idempotency_key\)"):
        declared(lambda to, idempotency_key: 1).arguments(("bob",), {})


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


# -- names


def test_tools_are_found_by_name_as_long_as_they_live():
    t = declared(name="found-by-name")
    sole(t)
    assert tool_named("found-by-name") is t
    del t
    gc.collect()
    assert tool_named("found-by-name") is None


def client(address, **options):
    @tool(**options)
    def send(text):
        return f"{text} to {address}"

    return send


def test_tools_of_one_factory_need_names_of_their_own():
    one, other = client("a"), client("b")
    for use, given in ((tool_named, one.name), (sole, one), (sole, other)):
        with pytest.raises(
            UsageError, match=r"2 different tools are named .*client.<locals>.send.*test_tools.py:\d+"
        ) as caught:
            use(given)
        assert "name=" in caught.value.remedy
    del other, given, caught
    sole(one)
    assert tool_named(one.name) is one
    a, b = client("a", name="send-a"), client("b", name="send-b")
    assert (tool_named("send-a"), tool_named("send-b")) == (a, b)
    sole(a)


def test_tools_that_a_factory_makes_of_the_same_parts_are_one():
    same = object()
    one, two = client(same), client(same)
    sole(one)
    assert tool_named(one.name) is two

    def verified(found):
        @tool(verify=lambda call: Done(found))
        def send(text):
            return text

        return send

    one, two = verified(same), verified(same)
    sole(one)
    other = verified(object())
    with pytest.raises(UsageError):
        sole(two)
    del other


def test_closures_and_lambdas_of_one_name_are_different_tools():
    made = [declared(lambda a, n=n: a + n) for n in range(3)]
    with pytest.raises(UsageError, match="3 different"):
        sole(made[0])
    made[1:] = []
    sole(made[0])


def test_a_tool_that_cannot_be_reached_any_more_is_in_nobodys_way():
    old = client("a")
    old.fn.itself = old  # a cycle, which only the collector takes
    name = old.name
    del old
    new = client("b")
    assert tool_named(name) is new


def test_one_function_declared_twice_is_one_tool():
    def act(a):
        return a

    class Post:
        def send(self, a):
            return a

    post = Post()
    for fn in (act, post.send):
        one, two = tool(fn), tool(effect="read")(fn)
        assert tool_named(one.name) is two, "the newest"
        sole(one)
        sole(two)
    first, second = tool(post.send), tool(Post().send)
    with pytest.raises(UsageError):
        sole(second)
    del first


def test_a_module_that_is_loaded_again_brings_the_same_tools(tmp_path, monkeypatch):
    (tmp_path / "reloaded_tools.py").write_text("from safepoint import tool\n\n\n@tool\ndef send(a):\n    return a\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("reloaded_tools")
    old = module.send  # as after `from reloaded_tools import send`
    importlib.reload(module)
    assert module.send is not old
    sole(module.send)
    sole(old)
    assert tool_named("reloaded_tools.send") is module.send


def test_names_that_are_made_up_do_not_pile_up():
    before = len(tools._registry.named)
    for n in range(2000):
        client("a", name=f"made-up-{n}")
    assert len(tools._registry.named) < before + 1000


# -- past a run


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
