"""What a DBOS step costs: a process of its own, as DBOS is one object per process and needs a newer sqlite3 than Debian's Python.

python bench/dbos_steps.py sqlite:////tmp/x.db 300     prints the median milliseconds of a step that does nothing
"""

from __future__ import annotations

import logging
import statistics
import sys
import time


def main(url: str, rounds: int) -> float:
    if url.startswith("sqlite"):
        import pysqlite3

        sys.modules["sqlite3"] = pysqlite3
    from dbos import DBOS

    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR", "run_migrations": True})
    spent: list[float] = []

    @DBOS.step()
    def noop(n: int) -> str:
        return "ok"

    @DBOS.workflow()
    def many(rounds: int) -> int:
        for n in range(rounds):
            began = time.perf_counter()
            noop(n)
            spent.append((time.perf_counter() - began) * 1e3)
        return rounds

    DBOS.launch()
    many(20)
    spent.clear()
    many(rounds)
    DBOS.destroy()
    return statistics.median(spent)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(main(sys.argv[1], int(sys.argv[2])))
