"""safepoint: a durable checkpointer for AI agents."""

from safepoint._version import __version__

__all__ = ["__version__"]
