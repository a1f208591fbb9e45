"""What PostgreSQL and libpq say, in the library's terms.

Nothing of a row is shown: only the first line of a message, never its detail, and no password. Each state has the meaning that
decides what is done: whether trying again can help, and whether the request may have been done.
"""

from __future__ import annotations

import psycopg

from safepoint.errors import Damaged, SafepointError, StoreFull, Unavailable, UsageError
from safepoint.stores.url import redact

__all__ = ["grants", "is_lost", "may_pass", "refused_login", "translate"]

_DOWN = {"57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "53300"}
"""A server that goes or comes, that ends connections which take too long, or that has too many."""
_AGAIN = _DOWN | {"40001", "40P01", "55P03", "55006", "57014"}
"""Serialization, deadlock, a lock not had in time, a cancelled statement."""


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection is gone, so that what was under way on it may have been done or not."""
    state = error.sqlstate
    if state is None:  # libpq's own word; what psycopg itself refuses to send are other classes
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state in _DOWN or state.startswith("08")


def may_pass(error: psycopg.Error) -> bool:
    """Whether the same request may do better a moment later."""
    return is_lost(error) or error.sqlstate in _AGAIN


_LOGIN = (
    "password authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "certificate verify failed",
    "is not permitted to log in",
    "unsupported authentication method",
    "peer authentication failed",
    "ident authentication failed",
)


_SETTINGS = (
    "unsupported startup parameter",
    "invalid sslmode value",
    "server does not support SSL, but SSL was required",
    "root certificate file",
)
"""Options of the URL that do not go with this server, or with the pooler before it."""

_DAMAGE = {"XX001", "XX002", "58P01", "58030"}
"""Pages and indexes that are not what they should be; a file that is gone or cannot be read."""
_CROWDED = ("too many clients", "connection slots", "too many connections")


def refused_login(error: psycopg.Error) -> bool:
    """Whether a connection was refused for a reason that waiting does not change. libpq gives a text and no state."""
    text = str(error)
    if (error.sqlstate or "")[:2] == "28" or error.sqlstate == "3D000" or any(words in text for words in _LOGIN + _SETTINGS):
        return True
    return "FATAL:" in text and "does not exist" in text


def translate(error: psycopg.Error, url: str, schema: str) -> SafepointError:
    """``url`` without a password; ``schema`` for people."""
    state, said = error.sqlstate or "", _first_line(error)
    if state in {"53100", "53400"}:
        return StoreFull(f"no room in {url}", said, "Free space on the database's disk, or raise its quota; then do it again.")
    if state in _DAMAGE or (state == "XX000" and "memory alloc" in said):
        return Damaged(
            f"{url} is damaged", said, "See what is left with safepoint verify; restore the database from a backup.", url=url
        )
    if state in {"42P01", "42883", "3F000", "42703", "42704", "42804"}:
        return Damaged(
            f"schema {schema!r} of {url} is not whole",
            said,
            "Restore it from a backup, or drop the schema if nothing in it is needed, and open the store again.",
            url=url,
        )
    if state == "42501":
        return UsageError(
            f"the user of {url} may not do that",
            said,
            f"As the schema's owner: {grants(schema)}",
        )
    if state == "25006":
        return Unavailable(f"{url} takes no writes", said, "It is a standby: name the primary, or target_session_attrs.")
    if state == "42939":
        return UsageError(f"schema {schema!r} cannot be made", said, "Use another name: those with pg_ are the server's own.")
    if state == "SP001":
        return UsageError(
            f"{url} runs its transactions at another level than READ COMMITTED",
            said,
            "ALTER ROLE … SET default_transaction_isolation = 'read committed', for the user of this store.",
        )
    if state in {"22021", "22P05"}:
        return UsageError(f"a text cannot be stored in {url}", said, "The database's encoding must be UTF8.")
    if state == "55P03":
        return Unavailable(f"{url} is busy", "somebody else holds a lock that is needed", "Do it again.")
    if state == "53300" or (not state and any(words in said for words in _CROWDED)):
        return Unavailable(f"{url} takes no more connections", said, "Raise max_connections, or use a smaller pool=.")
    if not state and not is_lost(error):
        return UsageError(f"{url} cannot be asked", said, "Correct the URL.")
    if any(words in said for words in _SETTINGS):
        return UsageError(f"{url} cannot be connected to", said, "Correct the options in the URL, or leave them out.")
    if refused_login(error):
        return UsageError(f"{url} refuses the login", said, "Correct user, password or database in the URL.")
    return Unavailable(
        f"{url} did not answer",
        said or type(error).__name__,
        "Look whether the server runs, and is the one that the URL names.",
    )


def grants(schema: str, user: str = "…") -> str:
    """What lets a user work with a store that somebody else has set up."""
    place = '"' + schema.replace('"', '""') + '"'
    given = ("SELECT, INSERT, UPDATE, DELETE ON ALL TABLES", "USAGE ON ALL SEQUENCES", "EXECUTE ON ALL FUNCTIONS")
    each = [f"GRANT USAGE ON SCHEMA {place} TO {user};", *(f"GRANT {what} IN SCHEMA {place} TO {user};" for what in given)]
    return " ".join(each)


def _first_line(error: psycopg.Error) -> str:
    said = error.diag.message_primary or str(error).strip().partition("\n")[0]
    return redact(said) if "://" in said or "passw" in said else said
