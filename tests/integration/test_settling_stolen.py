"""A holder that lost its task while it was about to ask a verifier asks nothing of the attempt that another has begun since."""

import pytest

import safepoint
from safepoint import LeaseLost, NotDone, tool
from tests.integration.conftest import STORES, new_url


@pytest.mark.parametrize("kind", STORES)
def test_the_attempt_of_a_newer_holder_is_not_asked_about(kind, tmp_path, monkeypatch):
    """Verifiers may tell the receiver to refuse the fence of the call that they are asked about: it would be the new holder's."""
    asked, made, seen, armed = [], [], [], [True]

    def verify(call):
        asked.append((call.fence, call.attempts))
        return NotDone()

    @tool(effect="write", verify=verify, settle_after=0.0, receiver_dedups=True)
    def send(key, *, fence):
        made.append(fence)
        if len(made) == 1:
            raise KeyboardInterrupt
        seen.append(look())
        return "sent"

    with safepoint.open(new_url(kind, tmp_path)) as cp:
        calls = cp.store.calls

        def look():
            return calls("t", nos=[1])

        def late(task, **options):
            if options.get("nos") and options.get("bodies", True) and armed:
                armed.clear()
                with cp.resume("t", steal=True) as thief:
                    assert thief.call(send, "x") == "sent"
                return seen[0]
            return calls(task, **options)

        with pytest.raises(KeyboardInterrupt), cp.resume("t") as run:
            run.call(send, "x")
        monkeypatch.setattr(cp.store, "calls", late)
        with pytest.raises(LeaseLost), cp.resume("t") as run:
            run.call(send, "x")
        assert (seen[0][0][0].status, seen[0][0][0].fence) == ("started", 3)
        assert not armed
        assert asked == [(1, 1)], "by the new holder"
        assert made == [1, 3]
        (call,) = cp.calls("t")
        assert (call.status, call.result) == ("succeeded", "sent")
