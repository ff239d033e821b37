"""Store of the server, opened on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from farm.base.errors import StoreError
from farm.store.store import Store, open_store


class StoreHolder:
    """Store that is opened on first use and again after an error, since a database may appear or be replaced."""

    def __init__(self, url: str, *, readonly: bool = True) -> None:
        self._url, self._lock, self._readonly = url, threading.Lock(), readonly
        self._store: Store | None = None

    @contextmanager
    def opened(self) -> Iterator[Store]:
        """Lend the store; after a StoreError the next caller gets a new one."""
        with self._lock:
            if self._store is None:
                self._store = open_store(self._url, readonly=self._readonly, existing=True)
            store = self._store
        try:
            yield store
        except StoreError:
            with self._lock:
                if self._store is store:
                    self._store = None
            store.close()
            raise
