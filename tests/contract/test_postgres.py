"""The PostgreSQL store against the contract, and against the oracle in a process that is killed."""

import pytest

from safepoint.stores.url import open_store
from safepoint.testing import StoreContract
from tests.support.servers import fresh_postgres_url


class TestPostgres(StoreContract):
    @pytest.fixture
    def opener(self):
        url = fresh_postgres_url()
        # The tables of tools lie in the store's schema, and go with it.
        url += f"&options=-csearch_path%3D{url.rpartition('=')[2]}"
        # "process" saves the waits for the disk; what "full" adds is tested where power is cut.
        return lambda: open_store(url, durability="process")
