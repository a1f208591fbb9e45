"""What a hold of a task brings with it on a server, apart from who has it."""

import uuid
from typing import Any

import pytest
import redis

import safepoint
from safepoint.stores.url import open_store
from tests.support.servers import fresh_postgres_url, fresh_redis_url, shared_cluster


@pytest.mark.parametrize("fresh", [fresh_postgres_url, fresh_redis_url])
def test_a_beat_that_falls_into_a_release_is_no_takeover(fresh, caplog):
    store: Any = open_store(fresh())
    store._renewals.every = 0.003
    for _ in range(300):
        grant = store.acquire("task", b"me")
        store.release("task", grant)
    store.close()
    assert "taken over" not in caplog.text


def test_a_run_brings_its_task_back_into_an_index_that_a_failover_has_set_back():
    prefix = f"c{uuid.uuid4().hex[:12]}:"
    cluster = shared_cluster().url
    cp = safepoint.open(f"{cluster}?cluster=true&durability=process&prefix={prefix}")
    with cp.resume("task") as run:
        run.save()
    side = redis.RedisCluster.from_url(cluster)
    assert sum(side.delete(f"{prefix}tasks:{{{k}}}") for k in range(64)) == 1
    side.close()
    assert cp.tasks() == []  # as its name lay on another node than the task
    cp.resume("task").close()
    assert [task.task_id for task in cp.tasks()] == ["task"]
    cp.close()
