"""What every store must pass, to be subclassed by whoever writes one; needs the extra ``testing``.

``StoreContract`` is a class of pytest tests, ``StoreMachine`` a Hypothesis machine that compares a store with plain dicts.
docs/write-a-store.md shows the few lines that a store's own test module is made of.
"""

from __future__ import annotations

from safepoint.errors import MissingExtra

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    raise MissingExtra(
        "safepoint.testing needs pytest and hypothesis", str(error), "pip install 'safepoint[testing]'"
    ) from error

# Before the modules are imported: an assert that only says "AssertionError" is of no use to the author of a store.
for _name in ("adapting", "commits", "contract", "leases", "machine", "oracle", "reading", "removal", "whole", "writes"):
    pytest.register_assert_rewrite(f"safepoint.testing.{_name}")

from safepoint.testing.contract import StoreContract  # noqa: E402
from safepoint.testing.drive import Local, Place, Remote  # noqa: E402
from safepoint.testing.machine import StoreMachine, run_machine  # noqa: E402

__all__ = ["Local", "Place", "Remote", "StoreContract", "StoreMachine", "run_machine"]
