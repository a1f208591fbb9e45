"""A state machine without any model: an order goes from phase to phase, and each phase may take a while.

    python examples/state_machine.py [--store URL] [--order ID] [--pace SECONDS]

Press Ctrl-C while it runs, or kill it, and start it again: it goes on in the phase in which it was. What is kept is one typed
object, a dataclass with an enum in it. A phase that was cut short is begun anew, but the parcel's label, the one thing in here
that must not happen twice, is bought by a tool and so is bought once.
"""

import argparse
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import safepoint
from safepoint import Call, Done, NotDone, Run, State, tool


@safepoint.register(name="example.Phase")
class Phase(StrEnum):
    NEW = "new"
    PICKED = "picked"
    PACKED = "packed"
    LABELLED = "labelled"
    DONE = "done"


# With a name of its own the class is found again whatever the script is called: here its module is __main__.
@safepoint.register(name="example.Order")
@dataclass
class Order:
    items: list[str]
    phase: Phase = Phase.NEW
    boxes: dict[int, list[str]] = field(default_factory=dict)
    label: str | None = None


LABELS = Path("labels.txt")
"""The carrier's book, which is none of the order's business but to look into."""


def was_it_bought(call: Call) -> Done | NotDone:
    lines = LABELS.read_text().splitlines() if LABELS.exists() else []
    return next((Done(line.split()[0]) for line in lines if line.endswith(call.idempotency_key)), NotDone())


@tool(name="buy_label", verify=was_it_bought, settle_after=0.1)
def buy_label(boxes: int, *, idempotency_key: str) -> str:
    number = f"PX{len(LABELS.read_text().splitlines()) + 1 if LABELS.exists() else 1:04d}"
    with LABELS.open("a") as book:
        book.write(f"{number} for {boxes} boxes, {idempotency_key}\n")
    return number


def advance(run: Run, order: Order, pace: float) -> None:
    """Do the work of one phase and enter the next. If it is cut short, ``order`` is again what it was."""
    time.sleep(pace)
    match order.phase:
        case Phase.NEW:
            order.items.sort()
            order.phase = Phase.PICKED
        case Phase.PICKED:
            order.boxes = {n: order.items[n * 2 : n * 2 + 2] for n in range((len(order.items) + 1) // 2)}
            order.phase = Phase.PACKED
        case Phase.PACKED:
            order.label = run.call(buy_label, len(order.boxes))
            order.phase = Phase.LABELLED
        case Phase.LABELLED:
            order.phase = Phase.DONE
            run.finish(order.label)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="sqlite:///orders.db")
    parser.add_argument("--order", default="order-7")
    parser.add_argument("--pace", type=float, default=1.0)
    args = parser.parse_args()
    with safepoint.open(args.store, state_type=Order) as cp:
        if cp.load_latest(args.order) is None:
            cp.save(State(args.order, agent_state=Order(["screws", "paint", "brush", "boards", "glue"])))
        try:
            with cp.resume(args.order) as run:
                order: Order = run.state.agent_state
                print(f"{args.order} is {order.phase}", flush=True)
                while order.phase is not Phase.DONE:
                    advance(run, order, args.pace)
                    run.save(label=order.phase.value)
                    print(f"{args.order} is {order.phase}", flush=True)
                print(f"{len(order.boxes)} boxes under label {order.label}")
        except KeyboardInterrupt:
            print(f"\ninterrupted; start it again to go on (status: {cp.status(args.order).status})")


if __name__ == "__main__":
    main()
