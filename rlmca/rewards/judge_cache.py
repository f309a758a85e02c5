"""What a judge has said, kept in SQLite: on disk, or for the run."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path


class JudgeCache:
    """Text by key, at most about `limit` entries: the oldest leave first. Usable from several threads and processes.

    Raises ValueError for a file that cannot be opened, or is something else.
    """

    def __init__(self, path: str | None, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        try:
            if path is not None:
                Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
            where = ":memory:" if path is None else str(Path(path).expanduser())
            self._open = sqlite3.connect(where, timeout=60, check_same_thread=False, isolation_level=None)
            self._open.execute("CREATE TABLE IF NOT EXISTS said (number INTEGER PRIMARY KEY, key TEXT UNIQUE, text TEXT)")
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"option 'cache': {path} cannot be used as a file of marks: {error}") from None

    def get(self, key: str) -> str | None:
        """What is kept under `key`."""
        with self._lock:
            row = self._open.execute("SELECT text FROM said WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, text: str) -> None:
        """Keeps `text` and drops what is beyond the limit."""
        with self._lock:
            self._open.execute("INSERT OR REPLACE INTO said (key, text) VALUES (?, ?)", (key, text))
            self._open.execute("DELETE FROM said WHERE number <= (SELECT MAX(number) FROM said) - ?", (self._limit,))
