"""Pages that take long to make, made once for all who ask: files without a name, that nobody else can open.

A page is handed out again only while nothing that went into it may have changed. Nothing of it outlives the process, so
that neither another version of farm nor another user ever finds one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from starlette.requests import Request

MOST_PAGES = 64
MOST_BYTES = 256 << 20
# Two at a time: each takes a hundred MB while it is made, and the interpreter makes one at a time anyway.
_AT_ONCE = 2
_CHUNK = 256 << 10


class Content(NamedTuple):
    """What a page will show, before it is made."""

    key: bytes
    """Hash of everything that goes into the page, which is a function of it alone."""
    make: Callable[[], bytes]
    is_current: Callable[[], bool]
    """Whether what the store does not know of it, such as files, is as it was."""


class KeptPage:
    """A page in a file without a name."""

    def __init__(self, content: bytes, key: bytes, folder: Path) -> None:
        self.key, self.size = key, len(content)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as somebody reads it
        self._file.write(content)
        self._file.flush()

    def read(self, offset: int) -> bytes:
        """Return a part of it."""
        return os.pread(self._file.fileno(), _CHUNK, offset)


class _Kept(NamedTuple):
    page: KeptPage
    version: Any
    """Of the store, before the content was read."""
    current_at: float
    """A moment at which it showed everything as it was."""
    is_current: Callable[[], bool]


class KeptPages:
    """Pages by name; of one name, one is made at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: OrderedDict[str, _Kept] = OrderedDict()
        # As long as somebody waits for a page of this name.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._making = asyncio.Semaphore(_AT_ONCE)

    async def answer(
        self,
        request: Request,
        name: str,
        version: Callable[[], Any],
        read: Callable[[], Content],
        headers: Mapping[str, str],
    ) -> Response:
        """Return the page of a name, as everything that it shows is now.

        `version` is equal to an earlier one only when the store is as it was then.
        """
        asked_at = time.monotonic()
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            page = await self._page(name, asked_at, version, read)
        if isinstance(page, bytes):
            return Response(page, headers=headers)
        tag = f'"{page.key.hex()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return StreamingResponse(_parts(page), headers={**headers, "etag": tag, "content-length": str(page.size)})

    async def _page(
        self, name: str, asked_at: float, version: Callable[[], Any], read: Callable[[], Content]
    ) -> KeptPage | bytes:
        known = self._known.get(name)
        # For whoever asked before that moment it is new enough, as for all who waited while it was made.
        if known is not None and known.current_at < asked_at:
            looked_at = time.monotonic()
            is_same = await run_in_threadpool(_is_same, known, version)
            known = known._replace(current_at=looked_at) if is_same else known
        if known is None or known.current_at < asked_at:
            async with self._making:
                made = await run_in_threadpool(self._make, known, version, read)
            if isinstance(made, bytes):
                return made
            known = made
        self._keep(name, known)
        return known.page

    def _make(self, known: _Kept | None, version: Callable[[], Any], read: Callable[[], Content]) -> _Kept | bytes:
        read_at, now = time.monotonic(), version()
        content = read()
        if known is not None and known.page.key == content.key:
            page = known.page
        else:
            made = content.make()
            try:
                page = KeptPage(made, content.key, self._folder)
            except OSError:
                # A full disk, a folder that cannot be written: the page is as good, and made again next time.
                return made
        return _Kept(page, now, read_at, content.is_current)

    def _keep(self, name: str, known: _Kept) -> None:
        self._known[name] = known
        self._known.move_to_end(name)
        while len(self._known) > 1 and (
            len(self._known) > MOST_PAGES or sum(one.page.size for one in self._known.values()) > MOST_BYTES
        ):
            self._known.popitem(last=False)


def hashed(*parts: bytes) -> bytes:
    """Return what tells contents apart."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _is_same(known: _Kept, version: Callable[[], Any]) -> bool:
    return bool(known.version == version() and known.is_current())


async def _parts(page: KeptPage) -> AsyncIterator[bytes]:
    offset = 0
    while offset < page.size:
        part = await run_in_threadpool(page.read, offset)
        if not part:
            return
        offset += len(part)
        yield part
