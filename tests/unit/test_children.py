"""The processes of the tests: whoever is left behind is ended, whenever that comes to light."""

import gc
import os
import socket
import time

import pytest

from tests.support.children import Server


def sleeps() -> None:
    time.sleep(60)


def one_more(n: int) -> int:
    return n + 1


def test_children_that_nobody_refers_to_are_ended_also_in_the_middle_of_a_question(monkeypatch):
    server = Server()
    try:
        children = [server.start(sleeps) for _ in range(3)]
        pids = [child.pid for child in children]
        real = socket.send_fds

        def collecting(*args):
            children.clear()
            gc.collect()
            return real(*args)

        monkeypatch.setattr(socket, "send_fds", collecting)
        assert server.run(one_more, 1) == 2
        monkeypatch.undo()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        child = server.start(sleeps)
        pid = child.pid
        del child
        assert not os.path.exists(f"/proc/{pid}")
    finally:
        server.close()


@pytest.mark.filterwarnings(r"ignore:.*use of fork\(\):DeprecationWarning")  # Python 3.12 and newer
def test_a_fork_of_the_test_ends_nobody():
    server = Server()
    try:
        child = server.start(sleeps)
        fork = os.fork()
        if not fork:
            try:
                del child
            finally:
                os._exit(0)
        os.waitpid(fork, 0)
        assert os.path.exists(f"/proc/{child.pid}/exe")
        assert server.run(one_more, 1) == 2
        child.kill()
        assert child.was_killed
    finally:
        server.close()
