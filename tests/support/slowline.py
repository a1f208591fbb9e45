"""A line that takes its time: what a client sends arrives some milliseconds later, on each connection for itself."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["SlowLine"]


class SlowLine:
    """Listens on ``port`` of 127.0.0.1 and hands on to the unix socket of a server. One thread for each connection."""

    def __init__(self, upstream: str, seconds: float) -> None:
        self.upstream = upstream
        self.seconds = seconds
        self.opened = 0
        self.living = 0
        self.most = 0
        """The most requests that were under way at the same moment."""
        self._busy = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="slow line")]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a connection was left open"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="slow connection")
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.connect(self.upstream)
            with self._lock:
                self.opened += 1
                self.living += 1
            waiting = False
            with contextlib.suppress(OSError):
                while True:
                    for sock in select.select([client, server], [], [])[0]:
                        data = sock.recv(1 << 16)
                        if not data:
                            raise ConnectionError
                        if sock is client and not waiting:
                            waiting = True
                            self._count(1)
                            time.sleep(self.seconds)
                        elif sock is server and waiting:
                            waiting = False
                            self._count(-1)
                        (server if sock is client else client).sendall(data)
            if waiting:
                self._count(-1)
            with self._lock:
                self.living -= 1

    def _count(self, by: int) -> None:
        with self._lock:
            self._busy += by
            self.most = max(self.most, self._busy)
