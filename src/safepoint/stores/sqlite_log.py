"""SQLite's log and the memory that is shared over it, looked at from outside.

By another process: to open and close them here would drop SQLite's locks.
"""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["SIDES", "inode", "refused", "wrong_log"]

SIDES = ("-wal", "-shm")

# The log's header, the index's, and the header of the last frame that the index knows of.
_LOOK = """
import sys
with open(sys.argv[1] + "-wal", "rb") as log, open(sys.argv[1] + "-shm", "rb") as memory:
    print(log.read(32).hex())
    index = memory.read(48)
    print(index.hex())
    page = int.from_bytes(index[14:16], sys.byteorder)
    log.seek(32 + max(int.from_bytes(index[16:20], sys.byteorder) - 1, 0) * ((65536 if page == 1 else page) + 24))
    print(log.read(24).hex())
"""


def inode(path: str) -> tuple[int, int] | None:
    try:
        st = os.stat(path)
    except OSError:
        return None
    return st.st_dev, st.st_ino


def wrong_log(path: str) -> str | None:
    """What is wrong with the log of the database at ``path``, which is open; '' if nothing is, None if that cannot be seen."""
    wrong = ""
    for _ in range(3):  # a log that was just begun anew may not yet agree with its index
        try:
            command = [sys.executable, "-I", "-S", "-c", _LOOK, path]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            log, memory, frame = (bytes.fromhex(line) for line in done.stdout.split("\n")[:3])
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        wrong = _compare(log, memory, frame)
        if not wrong:
            return ""
    return wrong


def _compare(log: bytes, memory: bytes, frame: bytes) -> str:
    if len(memory) < 48:
        return ""
    # The index is in the machine's own byte order, the log's header is not: https://sqlite.org/walformat.html
    if int.from_bytes(memory[16:20], sys.byteorder) == 0:
        return ""  # begun anew: its header comes with the first frame
    if len(log) < 32 or log[:3] != b"\x37\x7f\x06" or log[3] not in {0x82, 0x83}:
        return "does not begin as a log does"
    if log[16:24] != memory[32:40]:
        return "is another log than the one in use"
    if frame[8:16] != memory[32:40]:
        return "has not what was last written to it"
    return ""


def refused(path: str) -> tuple[str, str] | None:
    """Which of the files of a store this process may not write, and what would help; None if that is not what is wrong."""
    folder = os.path.dirname(path) or "."
    for name, needs in (
        (folder, os.R_OK | os.W_OK | os.X_OK),
        *((path + suffix, os.R_OK | os.W_OK) for suffix in ("", *SIDES)),
    ):
        if os.path.exists(name) and not os.access(name, needs, effective_ids=os.access in os.supports_effective_ids):
            if os.statvfs(name).f_flag & os.ST_RDONLY:
                return name, "Its file system is mounted read-only; mount it for writing."
            advice = f"chmod {'u+rwx' if name == folder else 'u+rw'} {name}, or run as its owner."
            if name.endswith("-wal"):
                advice += " Do not delete it: what was saved last may be nowhere else."
            return name, advice
    return None
