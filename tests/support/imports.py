"""What a server of children imports before it forks any: every store that can be imported here, so that no child does it again."""

import contextlib
import importlib

for _name in (
    "safepoint.stores.sqlite",
    "safepoint.stores.file",
    "safepoint.stores.postgres.store",
    "safepoint.stores.redis.store",
):
    with contextlib.suppress(ImportError):  # a client library that is not installed
        importlib.import_module(_name)
