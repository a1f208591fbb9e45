"""The demo: an agent at work, killed with SIGKILL again and again, and a count of what came of it.

    python examples/demo/run.py [--seed N] [--documents DIR] [--keep DIR] [--break verifier|intents]

Three kinds of processes are started: a chat model (model.py), a mail server (mail.py) and, one after the other, agents
(agent.py) that all work on the same task. This driver kills the agents. Five kills come at random moments, one at a random
moment of a start, one between the intent to send a mail and the sending, and one between the sending and its record: for the
last two the mail server holds its answer until the agent is dead, so that they hit whatever the seed. In the end all is counted
from outside; see evidence.py.

Exit code 0: every promise was kept. 1: one was broken, and is named. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import IO

from evidence import Kill, Line, Notes, expected, look, size, table  # type: ignore[import-not-found]
from mail import Mailbox  # type: ignore[import-not-found]
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

HERE = Path(__file__).resolve().parent
TASK = "read-the-folder"
TODAY = date(2025, 6, 30)
RANDOM_KILLS = 5
LIMIT = 90.0
"""Seconds. Something hangs if it takes so long; a broken promise too."""


class Stopped(Exception):
    """The demo cannot go on; the text says why."""


class Child:
    """A process of the demo and the lines that it says. It ends with the driver, as its standard input then does."""

    def __init__(self, script: str, *args: object, errors: IO[bytes]) -> None:
        command = [sys.executable, str(HERE / script), *map(str, args)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self.born = time.monotonic()
        self._rest = b""

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def heard(self) -> list[list[str]] | None:
        """The lines that are there, as words; None at the end. Blocks if there is nothing."""
        data = os.read(self.fileno(), 65536)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode().split() for line in lines]

    def port(self) -> int:
        for words in self.heard() or ():
            if words[0] == "port":
                return int(words[1])
        raise Stopped("a server did not start; see its .log file")

    def end(self) -> None:
        """Kill it, if it still lives, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Driver:
    def __init__(self, seed: int, documents: Path, folder: Path, broken: str | None, console: Console) -> None:
        self.documents, self.folder, self.broken, self.console = documents, folder, broken, console
        self.random = random.Random(seed)
        self.db = folder / "agent.db"
        self.store = f"sqlite:///{self.db}"
        self.mailbox = folder / "mailbox"
        self.requests = folder / "model-requests.jsonl"
        self.wanted = expected(documents, TODAY)
        self.notes = Notes()
        self.digests: set[str] = set()
        self.mails = 0
        self.began = time.monotonic()
        self.agents = 0
        self.at = ""
        self.live: Live | None = None
        self._told = 0
        # One to see the folder, one for each document, one for each that something is wrong with, and the last word.
        self.total = 2 + len(list(documents.glob("*.txt"))) + len({f.document for f in self.wanted})
        # At random moments, but spread over the whole of the work: each in its own fifth, measured in requests to the model,
        # and then a moment later. Not in the last few, or the agent might be done by then.
        share = max(1, self.total - 4) / RANDOM_KILLS
        self.due = deque(
            (int(share * (i + self.random.random())) + 1, self.random.uniform(0, 0.15)) for i in range(RANDOM_KILLS)
        )
        # Once the agent that is started after a kill is killed before it has got far.
        self.start_kill = (self.random.randint(1, RANDOM_KILLS), self.random.uniform(0.05, 0.5))

    def run(self) -> None:
        """Until the agent has finished. Raises Stopped if it does not."""
        with ExitStack() as stack:
            errors = {n: stack.enter_context((self.folder / f"{n}.log").open("wb")) for n in ("agent", "model", "mail")}
            model = Child("model.py", self.requests, errors=errors["model"])
            stack.callback(model.end)
            mail = Child("mail.py", self.mailbox, errors=errors["mail"])
            stack.callback(mail.end)
            ports = ["--model-port", model.port(), "--smtp-port", mail.port()]
            if self.wanted:
                for where in ("before", "after"):
                    mail.tell(f"hold {where} {self.random.randint(1, len(self.wanted))}")
            if self.console.is_terminal:
                self.live = stack.enter_context(Live(console=self.console, refresh_per_second=8))
            args: list[object] = ["--store", self.store, "--documents", self.documents, "--mailbox", self.mailbox, *ports]
            if self.broken:
                args += ["--break", self.broken]
            while self._agent(args, model, mail, errors["agent"]):
                pass

    def _agent(self, args: list[object], model: Child, mail: Child, errors: IO[bytes]) -> bool:
        """Run one agent up to its end or its death. Returns whether another one is needed."""
        self.agents += 1
        agent = Child("agent.py", *args, errors=errors)
        kill_at = None
        why = ""
        if len(self.notes.kills) == self.start_kill[0]:
            kill_at, why = agent.born + self.start_kill[1], "while it starts"
        self.at = ""
        with selectors.DefaultSelector() as selector:
            for child in (agent, model, mail):
                selector.register(child, selectors.EVENT_READ)
            try:
                while True:
                    now = time.monotonic()
                    if now - self.began > LIMIT:
                        raise Stopped(f"it took longer than {LIMIT:.0f} s; last seen: {self.at or 'a start'}")
                    if kill_at is None and self.at and self.due and len(self.digests) >= self.due[0][0]:
                        kill_at, why = now + self.due[0][1], "at random"
                    if kill_at is not None and now >= kill_at:
                        if why == "at random":
                            self.due.popleft()  # not before: a held answer may come first, and this one is still to come then
                        return self._kill(agent, why)
                    wait = 0.25 if kill_at is None else kill_at - now
                    for key, _ in selector.select(max(0.0, wait)):
                        lines = key.fileobj.heard()  # type: ignore[union-attr]
                        if lines is None:
                            if key.fileobj is not agent:
                                raise Stopped("a server died; see its .log file")
                            return self._ended(agent)
                        for words in lines:
                            held = self._hear(words)
                            if held:
                                return self._kill(agent, held)
                    self._show()
            finally:
                agent.end()

    def _hear(self, words: list[str]) -> str:
        """Take note of what a process says. Returns why to kill the agent now, if it is so."""
        match words:
            case ["request", _, digest]:
                self.digests.add(digest)
            case ["stored", number]:
                self.mails = int(number)
            case ["step", number]:
                self.notes.steps[int(number)] += 1
                self.at = f"step {number}"
            case ["held", where, _]:
                return f"held {where}"
        return ""

    def _kill(self, agent: Child, why: str) -> bool:
        agent.process.kill()
        code = agent.process.wait()
        after = time.monotonic() - self.began
        # What it said before it died is still in the pipe.
        for words in agent.heard() or ():
            self._hear(words)
        if code >= 0:
            return self._ended(agent)  # before the signal came
        weight, raw = size(self.db), look(self.db)
        if why.startswith("held"):
            place, in_effect = f"send_mail, {'not sent yet' if why == 'held before' else 'sent and not recorded'}", True
        elif not self.at:
            place, in_effect = "while starting", False
        elif raw.open_calls:
            name, key = raw.open_calls[-1]
            place, in_effect = name, name in ("send_mail", "book")
            if name == "send_mail":
                place += ", sent and not recorded" if Mailbox(self.mailbox).has_key(key) else ", not sent yet"
        else:
            place, in_effect = "between two calls", False
        kill = Kill(round(after, 3), agent.process.pid, why, place, in_effect, raw.step)
        self.notes.kills.append(kill)
        self.notes.deaths.append(raw)
        self.notes.sizes.append(weight)
        with (self.folder / "kills.jsonl").open("a") as file:
            file.write(json.dumps(asdict(kill)) + "\n")
        number = len(self.notes.kills)
        self._print(f"{after:5.1f} s  kill {number} of agent {kill.pid}, {raw.step:2d} steps done, in: {place}")
        return True

    def _ended(self, agent: Child) -> bool:
        code = agent.process.wait()
        if code == 0:
            return False
        why = "it waits for a person: a call is in doubt" if code == 3 else f"exit code {code}"
        raise Stopped(f"the agent ended without having finished ({why}); see {self.folder / 'agent.log'}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _show(self) -> None:
        done = min(len(self.digests), self.total)
        seconds = time.monotonic() - self.began
        line = (
            f"{seconds:5.1f} s  agent no. {self.agents}, {self.at or 'starting'}: {done} of {self.total} replies, "
            f"{self.mails} of {len(self.wanted)} mails, {len(self.notes.kills)} kills"
        )
        if self.live is not None:
            bar = "━" * (done * 30 // self.total)
            self.live.update(Text.assemble((bar.ljust(30, "─"), "green"), f" {line}"))
        elif done >= self._told + 10:
            self._told = done
            self._print(line)


def report(lines: list[Line], console: Console) -> list[str]:
    """Print the table and return what is broken."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("what came of it", no_wrap=True)
    shown.add_column("count", justify="right", no_wrap=True)
    shown.add_column("kept?", no_wrap=True)
    shown.add_column("counted from")
    for line in lines:
        mark = {None: Text(""), True: Text("yes", "green"), False: Text("BROKEN", "bold red")}[line.kept]
        shown.add_row(Text(line.what), f"{line.value:,}", mark, Text(line.source, "dim"))
    console.print(shown)
    return [line.broken for line in lines if line.kept is False]


def where_next(driver: Driver, console: Console) -> None:
    tool = shutil.which("safepoint", path=Path(sys.executable).parent) or "safepoint"
    if Path(tool).is_relative_to(Path.cwd()):
        tool = str(Path(tool).relative_to(Path.cwd()))
    console.print("\nWhere to look next:")
    for verb in ("log", "calls"):
        console.print(f"  {tool} {verb} {TASK} --store {shlex.quote(driver.store)}", soft_wrap=True, highlight=False)
    console.print(
        f"  {shlex.quote(str(driver.folder))}: mailbox, database, logs; remove it when you have seen enough\n", soft_wrap=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="An agent at work, killed again and again, and a count of what came of it.")
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which the agent is killed")
    parser.add_argument("--documents", type=Path, default=HERE / "documents", help="the folder of .txt files to read")
    parser.add_argument("--keep", type=Path, help="an empty or new folder for all that is made; a temporary one by default")
    parser.add_argument(
        "--break",
        dest="broken",
        choices=["verifier", "intents"],
        help="take a part of the protection away and see the promise fail: the verifier always answers NotDone(), or no intent "
        "is written before a mail is sent",
    )
    given = parser.parse_args()
    documents = given.documents.resolve()
    if not list(documents.glob("*.txt")):
        parser.error(f"there are no .txt files in {documents}")
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        if any(given.keep.iterdir()):
            parser.error(f"{given.keep} is not empty")
    folder = Path(given.keep or tempfile.mkdtemp(prefix="safepoint-demo-")).resolve()
    console = Console(width=None if sys.stdout.isatty() else 110)
    driver = Driver(given.seed, documents, folder, given.broken, console)
    files = len(list(documents.glob("*.txt")))
    console.print(
        f"An agent reads {files} documents, and is killed while it does. Seed {given.seed}; all files go to {folder}",
        soft_wrap=True,
        highlight=False,
    )
    if given.broken:
        console.print(f"As ordered, without protection: {given.broken}. The promises should break.", style="bold")
    broken: list[str] = []
    try:
        driver.run()
    except Stopped as stopped:
        broken.append(str(stopped))
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    seconds = time.monotonic() - driver.began
    console.print(f"{seconds:5.1f} s  {'stopped' if broken else 'finished'} after {driver.agents} agents\n", highlight=False)
    if driver.requests.exists():
        broken += report(table(driver.notes, driver.wanted, driver.db, driver.mailbox, driver.requests, documents), console)
    where_next(driver, console)
    for text in broken:
        console.print(Text(f"BROKEN: {text}", "bold red"), soft_wrap=True)
    if not broken:
        console.print("Every promise was kept.", style="bold green")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
