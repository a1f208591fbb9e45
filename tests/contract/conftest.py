"""Side doors: what lies in a store, read by other means than the store's own."""

import json
import subprocess
import sys

import pytest

_READER = """
import base64, json, sys, apsw
path, sql, params = json.load(sys.stdin)
rows = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY).execute(sql, params).fetchall()
hidden = [[{"b": base64.b64encode(v).decode()} if isinstance(v, bytes) else v for v in row] for row in rows]
json.dump(hidden, sys.stdout)
"""


@pytest.fixture
def sqlite_rows():
    """``sqlite_rows(path, sql, *params)``: the rows as they lie in the file.

    They are read by another process: a second connection in this one, when it is closed, would take SQLite's POSIX locks away
    from the store under test.
    """
    import base64

    def read(path, sql, *params):
        asked = json.dumps([str(path), sql, params])
        done = subprocess.run([sys.executable, "-c", _READER], input=asked, capture_output=True, text=True, check=True)
        return [tuple(base64.b64decode(v["b"]) if isinstance(v, dict) else v for v in row) for row in json.loads(done.stdout)]

    return read
