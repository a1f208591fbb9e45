"""Your own loop, with the explicit verbs: ``load_latest`` at the start, ``save`` after each turn.

    python examples/chat_loop.py [--store URL] [--task ID]

Each line that is typed is a turn. Ctrl-C, Ctrl-D or kill it, start it again, and the conversation goes on where it was: a turn
whose answer you have seen was saved before it was shown. A turn that was cut short has to be typed again; that, the lease and
the journal are what ``run_agent`` and ``cp.resume`` add.
"""

import argparse
import sys

import safepoint
from safepoint import State


def answer(messages: list) -> str:
    """Stands for a model: it remembers a name, and counts."""
    turns = [m["content"] for m in messages if m["role"] == "user"]
    names = [t.removeprefix("I am ").strip(" .!") for t in turns if t.startswith("I am ")]
    hello = f"{names[-1]}, you" if names else "You"
    return f"{hello} have told me {len(turns)} things. The first was: {turns[0]!r}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="sqlite:///chat.db")
    parser.add_argument("--task", default="chat-1")
    args = parser.parse_args()
    with safepoint.open(args.store) as cp:
        state = cp.load_latest(args.task) or State(task_id=args.task)
        if state.seq is None:
            print("A new conversation. Say something.")
        else:
            print(f"Welcome back; we stopped at checkpoint {state.seq}, {len(state.messages)} messages.")
        try:
            for line in sys.stdin:
                state.messages.append({"role": "user", "content": line.strip()})
                state.messages.append({"role": "assistant", "content": answer(state.messages)})
                state.step += 1
                cp.save(state)  # on the disk when this returns: what is shown is never forgotten
                print(state.messages[-1]["content"], flush=True)
        except KeyboardInterrupt:
            pass
        if state.seq is not None:
            print(f"Saved as {args.task}@{state.seq}.")


if __name__ == "__main__":
    main()
