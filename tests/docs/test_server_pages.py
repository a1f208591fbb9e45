"""What docs/postgresql.md and docs/redis.md tell an administrator to type is typed, and is enough for an agent."""

import re
import shlex
from urllib.parse import urlsplit

import psycopg
import pytest
import redis

import safepoint
from safepoint import State
from tests.support.paths import ROOT


def blocks(page, kind):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@safepoint.tool(effect="read", name="look")
def look() -> int:
    return 7


def step(run):
    run.finish(run.call(look))


def live_on_it(url):
    """All sorts of work: saves, a run with a call, retention, a copy, and a task removed whole."""
    with safepoint.open(url) as cp:
        state = State("task")
        for i in range(5):
            state.messages.append({"n": i, "text": "x" * 2000})
            cp.save(state)
        assert safepoint.run_agent(step, task_id="run", store=cp).result == 7
        assert cp.cleanup("task", keep_latest=1).deleted == (1, 2, 3, 4)
        cp.pin("task", 5)
        assert cp.verify().ok
        assert cp.copy_to("memory://").changed
        cp.save(State("big", agent_state={"blob": b"x" * 3_000_000}))  # staged beforehand
        cp.delete_task("big")
        assert [t.task_id for t in cp.tasks()] == ["run", "task"]
        found = {f.name: f for f in cp.check()}
        cp.delete_task("run")
        cp.delete_task("task")
    return found


@pytest.fixture
def database(postgres):
    """A database of its own, and how it is reached by a user."""
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute("CREATE DATABASE pages ENCODING 'UTF8' TEMPLATE template0")
    parts = urlsplit(postgres.url)

    def url(user):
        return parts._replace(netloc=f"{user}@", path="/pages").geturl()

    yield url, parts.username
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute("DROP DATABASE pages WITH (FORCE)")
        admin.execute("DROP ROLE IF EXISTS agents")


def test_the_rights_that_the_postgresql_page_grants_are_enough(database):
    url, owner = database
    with safepoint.open(url(owner)) as cp:
        assert cp.tasks() == []
    (grants,) = blocks("postgresql.md", "sql")
    with psycopg.connect(url(owner), autocommit=True) as admin:
        admin.execute(grants)
    assert live_on_it(url("agents"))["permissions"].level == "ok"


def test_without_rights_the_error_says_what_to_grant(database):
    url, owner = database
    with psycopg.connect(url(owner), autocommit=True) as admin:
        admin.execute("CREATE ROLE agents LOGIN")
    with pytest.raises(safepoint.UsageError) as caught, safepoint.open(url("agents")) as cp:
        cp.tasks()
    assert "GRANT" in caught.value.remedy


@pytest.mark.parametrize("may_config", [True, False])
def test_the_rights_that_the_redis_page_gives_are_enough(valkey, may_config):
    (line,) = blocks("redis.md", "redis")
    command = shlex.split(line)
    if not may_config:
        command.remove("+config|get")
    admin = redis.Redis.from_url(valkey.url)
    admin.execute_command(*command)
    try:
        parts = urlsplit(valkey.url)
        place = parts.netloc.rpartition("@")[2]
        found = live_on_it(parts._replace(netloc=f"agents:change-me@{place}").geturl())
        assert found["write"].level == "ok"
        assert ("config" in found) is not may_config
    finally:
        admin.execute_command("ACL", "DELUSER", "agents")
        for key in admin.scan_iter("safepoint:*"):
            admin.delete(key)
        admin.close()


def test_the_settings_of_the_redis_page_are_real_ones(valkey):
    (settings,) = blocks("redis.md", "conf")
    admin = redis.Redis.from_url(valkey.url)
    try:
        for line in settings.splitlines():
            name, value = shlex.split(line)
            before = admin.config_get(name)[name]
            assert before is not None
            admin.config_set(name, value)
            assert admin.config_get(name)[name] == value
            admin.config_set(name, before)
    finally:
        admin.close()
