"""Graph programs for LangGraph savers: each is written once and runs sync or async, under each durability, on any saver.

``PROGRAMS`` holds them by name. ``driver`` hides how a graph is called, ``facts`` makes what was seen comparable, ``subjects``
makes the savers.
"""

from tests.support.graphs import agents, deltas, failures, histories, interrupts, plain, subgraphs
from tests.support.graphs.driver import PROGRAMS, Driver, Program, run_program

__all__ = ["PROGRAMS", "Driver", "Program", "run_program"]

# Imported for the programs that they declare.
_DECLARING = (plain, subgraphs, interrupts, histories, failures, deltas, agents)
