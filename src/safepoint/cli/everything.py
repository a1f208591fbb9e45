"""The whole command line: importing this registers every command."""

from safepoint.cli import branching, integrity, moving
from safepoint.cli.app import cli

__all__ = ["branching", "cli", "integrity", "moving"]
