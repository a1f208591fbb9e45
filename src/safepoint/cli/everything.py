"""The whole command line: importing this registers every command."""

from safepoint.cli import branching, cleaning, editing, holding, integrity, moving
from safepoint.cli.app import cli

__all__ = ["branching", "cleaning", "cli", "editing", "holding", "integrity", "moving"]
