"""The command that takes a task from whoever holds it: release. Registers itself with the group of ``app``."""

from __future__ import annotations

import click

from safepoint.cli import facts, views
from safepoint.cli.app import as_json, cli, common, opened, yes
from safepoint.cli.screen import Screen
from safepoint.cli.text import name
from safepoint.holding import lease_of

__all__ = ["release"]


@cli.command()
@click.argument("task")
@yes
@common
def release(task: str, yes: bool) -> None:
    """Take a task from its live holder by force.

    For a holder that hangs, is stopped, or runs where nobody can end it. It can write nothing any more; but it is only presumed
    dead, and a call that it is in the middle of may still take effect. So its open writes are looked after as after a crash of
    which nobody knows: verified, or put before a person. Where the process can be ended, end it instead: then its death is
    proven, and the task is free by itself. The task is "interrupted" afterwards, for the next resume.

    Of a task that nobody holds, nothing is changed.
    """
    with opened() as cp:
        cp.status(task)  # refuses one that is not there
        lease = lease_of(cp.store.lease(task))
        if lease is not None and lease.live and not yes:
            views.held(task, facts.lease(lease))
            click.confirm(f"Take {name(task)} from it by force?", abort=True, err=True)
        taken = cp.release(task)
        after = facts.plan(cp.plan(task))
    shown = taken or lease
    if as_json():
        data = {
            "task_id": task,
            "released": taken is not None,
            "lease": None if shown is None else facts.lease(shown),
            "next": views.follows(after),
            "plan": after,
        }
        Screen().json(data)
        return
    screen = Screen()
    if taken is not None:
        screen.line(f"{name(task)} is taken from {views.who(facts.lease(taken))}, which is presumed dead")
    elif shown is not None and not shown.live:
        screen.line(f"nobody holds {name(task)}: {views.who(facts.lease(shown))} is {shown.standing}; nothing was changed")
    else:
        screen.line(f"nobody holds {name(task)}: nothing was changed")
    for text in views.follows(after):
        screen.line(text)
