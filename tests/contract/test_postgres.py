"""The PostgreSQL store against the contract, and against the oracle in a process that is killed."""

import time

import psycopg
import pytest
from hypothesis import settings

from safepoint.stores.postgres.store import PostgresStore
from safepoint.stores.url import open_store
from safepoint.testing import Place, Remote, StoreContract, StoreMachine, run_machine
from tests.support.scale import SOAK, scale
from tests.support.seeds import fresh_seed
from tests.support.servers import done_with, fresh_postgres_url, shared_postgres

# Fewer lives than in memory, which looks for all that needs no crash: a step asks a server, from a process of its own.
LIVES = settings(max_examples=scale(30, 60), stateful_step_count=scale(60, 120))


class TestPostgres(StoreContract):
    @pytest.fixture
    def opener(self):
        url = fresh_postgres_url()
        # The tables of tools lie in the store's schema, and go with it.
        url += f"&options=-csearch_path%3D{url.rpartition('=')[2]}"
        # "process" saves the waits for the disk; what "full" adds is tested where power is cut.
        return lambda: open_store(url, durability="process")


class Settled(Remote):
    """What a killed process had sent is still worked off by its server: the machine looks when that is done with."""

    def _end(self):
        super()._end()
        name = self.place.keywords["schema"]
        end = time.monotonic() + 30
        with psycopg.connect(shared_postgres().url, autocommit=True) as side:
            while side.execute("SELECT FROM pg_stat_activity WHERE application_name = %s", (name,)).fetchone() is not None:
                assert time.monotonic() < end, "a session outlived its client"
                time.sleep(0.001)


class PostgresMachine(StoreMachine):
    if not SOAK:
        # In a process of its own a step takes ten times as long as in memory: what needs no crash is looked for there.
        ALWAYS = frozenset()

    def driver(self):
        # The class and not its URL's opener: the processes are forked from one that has imported where that comes from.
        self.url = fresh_postgres_url()
        url, _, schema = self.url.rpartition("&schema=")
        url += f"&application_name={schema}"
        return Settled(Place(PostgresStore, (url,), {"schema": schema, "durability": "process"}))

    def teardown(self):
        super().teardown()
        if url := getattr(self, "url", None):
            done_with(url)  # hundreds of them in one test


@pytest.mark.scaled
def test_machine():
    run_machine(PostgresMachine, profile=LIVES, seed=fresh_seed())
