"""What the golden store holds: the same tasks whenever they are built, to be written once and compared for ever."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw

import safepoint
from safepoint import State, tool
from safepoint.checkpointer import Checkpointer
from safepoint.codec import states
from safepoint.codec.states import Control
from safepoint.model import new_id
from safepoint.rows import CallRow, CallWrite, CheckpointRow, Commit, Head, PauseRow, PauseWrite, replace
from tests.support import samples

CALL_STATUSES = ("started", "succeeded", "failed", "paused", "in_doubt", "quarantined")
PAUSE_STATUSES = ("open", "answered", "used")
SIZES = {1: 40, 2: 80, 3: 150}
"""How many messages the checkpoints of the task ``history`` have."""

sent: list[str] = []
crash = [False]


@tool(name="golden.send")
def send(to: str, body: Any) -> str:
    sent.append(to)
    return f"sent to {to}"


def step(run: Any) -> None:
    """A write, then maybe a death, then a question, then the end."""
    receipt = run.call(send, "bob", body={"text": "x" * 100})
    run.state.messages.append({"role": "tool", "content": receipt})
    if crash[0]:
        raise KeyboardInterrupt
    if run.pause("approve", {"what": "the rest"}) == "yes":
        run.finish("approved")


@contextmanager
def opened(path: Any) -> Iterator[Checkpointer]:
    with safepoint.open(f"sqlite:///{path}", types=samples.CLASSES, retention=safepoint.Retention.keep_all()) as cp:
        yield cp


def messages(n: int) -> list[Any]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": f"message number {i}: " + "abcdefghij" * (i % 5)} for i in range(n)
    ]


def history(n: int) -> State:
    """A state with a list of several pages and a value of every type of the table."""
    state = State("history", step=n, messages=messages(n), metadata={"n": n, "even": n % 2 == 0})
    state.agent_state = {"typed": {name: samples.golden(name) for name in samples.GOLDEN}, "phase": "plan"}
    return state


def call_row(status: str, base_seq: int) -> tuple[CallRow, Any]:
    """A call of a status, and the objects of its arguments and result."""
    args = states.pack_values({"to": "bob", "body": "x" * 100}, samples.REGISTRY, None, "arguments")
    result = states.pack_values({"result": [status, 1.5]}, samples.REGISTRY, None, "result")
    row = CallRow(
        line=1, step=0, scope=2, ident=b"identity of call", tool="golden.send", effect="write", call_id=f"call_{status}",
        idempotency_key=f"key-{status}", op_key=b"k" * 16, status=status, fence=3, base_seq=base_seq, started_at=5,
        args=args.data, args_refs=args.refs,
    )  # fmt: skip
    if status == "succeeded":
        row = replace(row, result=result.data, result_refs=result.refs, finished_at=6)
    return row, (*args.new, *result.new)


def pause_row(status: str, base_seq: int) -> PauseRow:
    answer = None if status == "open" else b"\xc3"
    return PauseRow(
        line=1, step=0, name=f"ask-{status}", base_seq=base_seq, question=b"\xa1?", answer=answer, status=status, asked_at=5
    )


def checkpoint_row() -> CheckpointRow:
    """The header of a state of 400 messages, so long that its pages are paged."""
    packed = states.pack_state(history(400), Control([["", "the job", "open", None, 0]]), samples.REGISTRY, None)
    return CheckpointRow(
        id="golden", step=400, kind="step", label="l", created_at=5, format=states.FORMAT, schema=1, size=packed.size,
        digest=packed.digest, metadata=b"\x80", metrics=b"\x90", root=packed.data, refs=packed.refs, seq=7,
    )  # fmt: skip


def write(path: Any) -> None:
    """Fill a new store."""
    with opened(path) as cp:
        state = cp.load_latest("history") or history(SIZES[1])
        for seq, n in SIZES.items():
            fresh = history(n)
            state.messages[:], state.step, state.metadata = fresh.messages, n, fresh.metadata
            state.agent_state = fresh.agent_state
            assert cp.save(state, label=f"with {n}", kind="milestone" if seq == 2 else "manual").seq == seq
        cp.pin("history", 1)
        _branch(cp, "side", moves_head=True)
        _branch(cp, "main", moves_head=False)

        state = State("journal")
        seq = cp.save(state).seq
        for status in CALL_STATUSES:
            row, objects = call_row(status, seq)
            cp.store.commit(Commit(task="journal", id=new_id(), calls=(CallWrite(row, "began"),), objects=objects))
        pauses = tuple(PauseWrite(pause_row(status, seq)) for status in PAUSE_STATUSES)
        cp.store.commit(Commit(task="journal", id=new_id(), pauses=pauses))

        crash[0] = True
        try:
            safepoint.run_agent(step, task_id="interrupted", input="do it", store=cp)
        except KeyboardInterrupt:
            pass
        crash[0] = False
        safepoint.run_agent(step, task_id="waiting", input="do it", store=cp)
        safepoint.run_agent(step, task_id="finished", input="do it", store=cp)
        cp.answer("finished", "approve", "yes")
        safepoint.run_agent(step, task_id="finished", store=cp)
        safepoint.run_agent(step, task_id="deleted", input="do it", store=cp)
        cp.delete_task("deleted")


def _branch(cp: Checkpointer, branch: str, *, moves_head: bool) -> None:
    """A fork from the middle of the history, or a failure leaf below its end."""
    found = cp.store.read("history", seq=2 if moves_head else 3)
    assert found is not None
    row, _ = found
    on = Head(row.seq, row.id)
    kind = "edit" if moves_head else "failure"
    new = replace(row, id=new_id(), branch=branch, parent_seq=row.seq, kind=kind, seal=b"", seq=0, pinned=False)
    expect = None if moves_head else on
    cp.store.commit(Commit(task="history", id=new.id, checkpoint=new, expect=expect, stands_on=on, moves_head=moves_head))


def facts(cp: Checkpointer) -> dict[str, Any]:
    """What must never change of a store that was written once: digests and seals of all rows."""
    found = {}
    for row in cp.store.tasks():
        calls, _ = cp.store.calls(row.task)
        branches = cp.store.branches(row.task)
        found[row.task] = {
            "checkpoints": [[c.seq, c.branch, c.kind, c.digest.hex(), c.seal.hex()] for c in cp.store.headers(row.task)],
            "branches": [[b.name, b.head.seq, b.line, b.forked_from] for b in branches],
            "calls": [[c.no, c.status, c.seal.hex()] for c in calls],
            "pauses": [[p.no, p.status, p.seal.hex()] for p in cp.store.pauses(row.task)],
            "row": [row.status, row.branch, row.step, row.attempts, row.in_doubt, row.open_pauses, row.checkpoints],
        }
    return found


def dump(path: Any) -> str:
    """The whole file as SQL."""
    conn = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        lines = [f"PRAGMA {name}={conn.pragma(name)};" for name in ("page_size", "application_id", "user_version")]
        made = conn.execute("SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
        mine = [(kind, sql) for kind, name, sql in made if not str(name).startswith("sqlite_")]
        lines += [f"{sql};" for kind, sql in mine if kind != "trigger"]
        for name in [name for kind, name, _ in made if kind == "table"]:
            for values in conn.execute(f'SELECT * FROM "{name}" ORDER BY 1'):
                lines.append(f"INSERT INTO {name} VALUES ({', '.join(map(apsw.format_sql_value, values))});")
        lines += [f"{sql};" for kind, sql in mine if kind == "trigger"]  # last: they count what is inserted
    finally:
        conn.close()
    return "\n".join(lines) + "\n"


def load(text: str, path: Any) -> None:
    """Make a file of a dump."""
    conn = apsw.Connection(str(path))
    try:
        pragmas, begin, rest = text.partition("CREATE")
        conn.execute(f"{pragmas} BEGIN; {begin}{rest} COMMIT")
    finally:
        conn.close()
