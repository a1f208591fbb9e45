"""The rows live in safepoint.rows, below stores and rules alike."""

from safepoint.rows import *  # noqa: F403
