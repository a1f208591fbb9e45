"""Whether a folder is fit for a store: a real write, who may read it, and where it lives."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress

from safepoint.errors import SafepointError
from safepoint.model import Finding
from safepoint.stores.file_folder import TEMP, Folders
from safepoint.stores.sqlite_check import network_file_system, room

__all__ = ["check"]


def check(f: Folders) -> list[Finding]:
    return [_write_and_read(f), _file_system(f.path), room(f.path, "Free some space.", files=True), _permissions(f)]


def _write_and_read(f: Folders) -> Finding:
    data = secrets.token_hex(16).encode()
    try:
        with (
            f.made_under(0) as byte,
            f.root() as root,
            f.ops.opened(f.ops.child(TEMP, root, create=True)) as folder,
        ):
            name = f"{byte:x}-{secrets.token_hex(8)}"
            try:
                f.put(root, name, data, folder, byte=byte)
                seen = f.get(name, folder)
            finally:
                try:
                    f.ops.unlink(name, folder)
                except OSError:
                    pass
    except SafepointError as error:
        return Finding("write", "error", f"a write did not succeed: {error.what}: {error.why}", error.remedy)
    if seen != data:
        return Finding("write", "error", "what was written was not read back", "Look at the disk.")
    return Finding("write", "ok", "a write was made durable and read back")


def _file_system(path: str) -> Finding:
    kind = network_file_system(path)
    if kind is None:
        return Finding("file system", "ok", "not a network file system")
    return Finding(
        "file system",
        "warning",
        f"a network file system ({kind}): locks of other hosts may not be seen",
        "Use it from one host only, or PostgreSQL.",
    )


def _permissions(f: Folders) -> Finding:
    """Of the root and of what lies in it, two levels down: the rest is made by the library."""
    me = os.geteuid()
    try:
        with f.root() as root:
            places = [(".", f.ops.fstat(root))]
            for name in sorted(f.ops.list(root)):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    places.append((name, f.ops.lstat(name, root)))
    except (SafepointError, OSError) as error:
        return Finding("permissions", "error", f"they cannot be looked at: {error}", "Look at the folder.")
    for name, st in places:
        if stat.S_ISLNK(st.st_mode):
            return Finding("permissions", "error", f"{name} is a link, which is never followed", f"Remove {name}.")
        if st.st_uid != me:
            return Finding(
                "permissions", "warning", f"{name} belongs to user {st.st_uid}, not to {me}", f"chown -R {me} {f.path}"
            )
        if stat.S_IMODE(st.st_mode) & 0o077 and name != ".gitignore" and not name.startswith(".git"):
            return Finding(
                "permissions",
                "warning",
                f"{name} has mode {stat.S_IMODE(st.st_mode):04o}: others can open it",
                f"chmod -R go= {f.path}",
            )
    return Finding("permissions", "ok", "nobody else can open it")
