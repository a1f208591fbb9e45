"""A line to a Redis server that breaks when a test says so: after a request was carried over, and before its answer is."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from pathlib import Path

__all__ = ["Line"]


class Line:
    """Listens on a unix socket and hands everything on. ``lose`` names what a request has in it whose answers get lost, and how
    many of them do; the server has done it by then."""

    def __init__(self, folder: Path, server: str) -> None:
        self.path = str(folder / "line")
        self._server = server
        self._lock = threading.Lock()
        self._lost: tuple[bytes, int] = (b"", 0)
        self.lost = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis+unix://{self.path}?db=0"

    def lose(self, mark: bytes, times: int = 1) -> None:
        with self._lock:
            self._lost, self.lost = (mark, times), 0

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._carry, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(self._server)
            asked = b""
            while True:
                ready, _, _ = select.select([client, server], [], [])
                if client in ready:
                    data = client.recv(1 << 20)
                    if not data:
                        return
                    asked += data
                    server.sendall(data)
                if server in ready:
                    data = server.recv(1 << 20)
                    if not data or self._is_lost(asked):
                        return
                    asked = b""
                    client.sendall(data)

    def _is_lost(self, asked: bytes) -> bool:
        with self._lock:
            mark, times = self._lost
            if not times or mark not in asked:
                return False
            self._lost = mark, times - 1
            self.lost += 1
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(5)
