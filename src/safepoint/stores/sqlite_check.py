"""Whether a SQLite file, and the place it lies in, are fit for a store."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import apsw

from safepoint.errors import SafepointError, UsageError
from safepoint.model import Finding
from safepoint.stores.sqlite_db import CommitFailed, Database
from safepoint.stores.sqlite_log import refused, wrong_log

__all__ = ["check", "network_file_system", "refuse_network", "room"]

_NETWORK = {
    "nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "ceph", "glusterfs", "lustre", "gpfs", "beegfs",
    "ocfs2", "gfs2", "davfs", "webdav", "afpfs", "vboxsf", "prl_fs", "virtiofs",
}  # fmt: skip
_NETWORK_FUSE = (
    "sshfs",
    "glusterfs",
    "s3fs",
    "rclone",
    "davfs",
    "curlftpfs",
    "gcsfuse",
    "ceph",
    "nfs",
    "smb",
    "juicefs",
    "goofys",
)
_WAL_RESET_FIXED = (3, 51, 3)
_FULL = "Free space: a full disk cannot be cleaned by deleting checkpoints."


def network_file_system(path: str, mounts: str = "/proc/mounts") -> str | None:
    """The type of the network file system that a path lies on, None for a local one or where that cannot be told."""
    try:
        with open(mounts, "rb") as f:
            lines = f.read().split(b"\n")
    except OSError:
        return None
    best, kind = "", ""
    for line in lines:
        parts = line.split(b" ")
        if len(parts) < 3:
            continue
        # Blanks and the like are written in octal there.
        at = os.fsdecode(
            parts[1].replace(b"\\040", b" ").replace(b"\\011", b"\t").replace(b"\\012", b"\n").replace(b"\\134", b"\\")
        )
        # The last of several on one place is the one that is seen.
        if (path == at or path.startswith(at.rstrip("/") + "/")) and len(at) >= len(best):
            best, kind = at, os.fsdecode(parts[2])
    sub = kind.partition(".")[2] if kind.startswith("fuse.") else ""
    return kind if kind in _NETWORK or any(name in sub for name in _NETWORK_FUSE) else None


def refuse_network(path: str, network_ok: bool) -> None:
    kind = None if network_ok else network_file_system(path)
    if kind is not None:
        raise UsageError(
            f"{path} lies on a network file system ({kind})",
            "SQLite's log needs memory shared by all who use the file, and locks there cannot be relied on",
            "Use a local disk or PostgreSQL; if only one host will ever use the file, pass network_ok=True.",
            path=path,
        )


def check(db: Database, path: Path) -> list[Finding]:
    db.usable()
    found = [_files(db)]  # first: a write would cover up what is wrong there
    if found[0].level == "error":
        found.append(Finding("write", "error", "not tried: it could overwrite what is left", found[0].remedy))
    else:
        found.append(_write_and_read(db))
    found += [_version(), _journal(db)]
    kind = network_file_system(str(path))
    if kind is None:
        found.append(Finding("file system", "ok", "not a network file system"))
    else:
        found.append(Finding("file system", "error", f"a network file system ({kind})", "Move the file to a local disk."))
    found += [room(str(path.parent), _FULL), _foreign(db, path), _permissions(path)]
    return found


def _write_and_read(db: Database) -> Finding:
    try:
        with db.writing(True) as conn:
            conn.execute("UPDATE sp_meta SET value = value + 1 WHERE key = 'nonce'")
            written = conn.rows("SELECT value FROM sp_meta WHERE key = 'nonce'")
        with db.reading() as conn:
            seen = conn.rows("SELECT value FROM sp_meta WHERE key = 'nonce'")
    except CommitFailed as failed:
        return Finding("write", "error", f"a write did not succeed: {failed.cause}", failed.cause.remedy)
    except SafepointError as error:
        return Finding("write", "error", f"a write did not succeed: {error}", error.remedy)
    # Another process may have counted on in between.
    if not written or not seen or seen[0][0] < written[0][0]:
        return Finding("write", "error", "what was written was not read back", "Restore the file from a backup.")
    return Finding("write", "ok", "a write was made durable and read back")


def _files(db: Database) -> Finding:
    """Whether the log is the one that the shared memory speaks of, and both are those that are open here."""
    wrong = db.wrong_files()
    if wrong is None:
        said = wrong_log(db.path)
        if said is None:
            return Finding("files", "warning", "the log could not be looked at")
        if not said:
            return Finding("files", "ok", "the log is the one that is in use")
        wrong = f"{db.path}-wal", said
    text = f"{os.path.basename(wrong[0])} {wrong[1]}"
    remedy = "Copy all files of the store aside and delete none; end every process that uses it, and open it anew."
    return Finding("files", "error", text, remedy)


def _version() -> Finding:
    version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")[:3]) < _WAL_RESET_FIXED:
        text = f"SQLite {version} can damage a database when two processes fold its log at once"
        return Finding("sqlite", "warning", text, "pip install -U apsw")
    return Finding("sqlite", "ok", f"SQLite {version}")


def _journal(db: Database) -> Finding:
    try:
        with db.reading() as conn:
            mode = conn.rows("PRAGMA journal_mode")[0][0]
    except SafepointError as error:
        return Finding("journal", "error", str(error), error.remedy)
    if mode != "wal":
        return Finding("journal", "error", f"journal mode is {mode}", "Let nothing else set it; open the store anew.")
    return Finding("journal", "ok", "write-ahead log")


def room(path: str, remedy: str, *, files: bool = False) -> Finding:
    """Whether the disk that a folder lies on is nearly full; with ``files``, also whether it can still hold many more of them."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return Finding("disk", "warning", f"its free space is not known: {error.strerror}", "Look at the disk.")
    free, all_of_it = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    text = f"{free / 1e6:,.0f} MB free"
    if free < 200e6 or free < 0.05 * all_of_it:
        return Finding("disk", "warning", text, remedy)
    # Some file systems have no such limit, and say so with zeros.
    if files and disk.f_files and disk.f_favail < 10_000:
        return Finding("disk", "warning", f"{text}, but room for {disk.f_favail:,} more files only", remedy)
    return Finding("disk", "ok", text)


def _foreign(db: Database, path: Path) -> Finding:
    """Descriptors of the database in this process beyond those of SQLite: closing one drops SQLite's locks."""
    ours: dict[tuple[int, int], str] = {}
    for suffix in ("", "-wal", "-shm"):
        try:
            st = os.stat(f"{path}{suffix}")
        except OSError:
            continue
        ours[st.st_dev, st.st_ino] = suffix
    counts, others = dict.fromkeys(("", "-wal", "-shm"), 0), 0
    try:
        fds = os.listdir("/proc/self/fd")
    except OSError:
        return Finding("descriptors", "ok", "cannot be looked at on this system")
    for fd in fds:
        try:
            st = os.stat(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if (where := ours.get((st.st_dev, st.st_ino))) is not None:
            counts[where] += 1
            others += where == "" and not _of_sqlite(fd)
    # All connections of all stores of this process on this file, and one shared mapping. SQLite puts the descriptors of connections
    # that were closed (a second store, verify's own) aside as long as others are open: of the database itself there may be more.
    own = db.connections_on_file()
    most = {"": counts[""] - others, "-wal": own, "-shm": min(own, 1)}
    extra = [f"{path.name}{suffix}" for suffix, n in counts.items() if n > most[suffix]]
    if extra:
        text = f"something else in this process has {', '.join(extra)} open"
        return Finding("descriptors", "error", text, "Read it through cp.connection(), or in another process.")
    return Finding("descriptors", "ok", "nothing else in this process has the file open")


def _of_sqlite(fd: str) -> bool:
    """Whether a descriptor was opened as SQLite opens a database: for writing too, and never through a link."""
    try:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            flags = int(next(line for line in info if line.startswith("flags:")).split()[1], 8)
    except (OSError, StopIteration, ValueError):
        return True
    return bool(flags & os.O_NOFOLLOW and flags & os.O_RDWR)


def _permissions(path: Path) -> Finding:
    if (found := refused(str(path))) is not None:
        return Finding("permissions", "error", f"{found[0]} cannot be written", found[1])
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        return Finding("permissions", "error", f"{path}: {error.strerror}")
    if mode & 0o077:
        return Finding("permissions", "warning", f"{path.name} has mode {mode:04o}: others can open it", f"chmod 600 {path}*")
    return Finding("permissions", "ok", f"mode {mode:04o}")
