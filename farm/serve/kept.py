"""Cache of pages that take long to render, in unnamed temporary files that no other user can open.

A page is served again only while all its inputs are unchanged. The files end with the process, so that another version
of farm or another user never finds a page.
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
# Two at a time: each takes about 100 MB while it is rendered, and the interpreter lock allows one at a time anyway.
_AT_ONCE = 2
_CHUNK = 256 << 10


class Content(NamedTuple):
    """Inputs of a page, read before the page is rendered."""

    key: bytes
    """Hash of all inputs; the page is a function of them alone."""
    make: Callable[[], bytes]
    is_current: Callable[[], bool]
    """Return True while inputs outside the store, such as files, are unchanged."""


class KeptPage:
    """Rendered page in an unnamed temporary file."""

    def __init__(self, content: bytes, key: bytes, folder: Path) -> None:
        self.key, self.size = key, len(content)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as somebody reads it
        self._file.write(content)
        self._file.flush()

    def read(self, offset: int) -> bytes:
        """Return up to 256 KiB of the page from `offset`."""
        return os.pread(self._file.fileno(), _CHUNK, offset)


class _Kept(NamedTuple):
    page: KeptPage
    version: Any
    """Version of the store before the content was read."""
    current_at: float
    """Monotonic time at which the page was known to be current."""
    is_current: Callable[[], bool]


class KeptPages:
    """Cache of pages by name; at most one page of a name is rendered at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: OrderedDict[str, _Kept] = OrderedDict()
        # A lock lives as long as a request waits for a page of this name.
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
        """Return the page of a name in its current state.

        `version` returns an equal value only while the store is unchanged.
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
        # The page is current for requests from before `current_at`, as for all that waited while it was rendered.
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
                # A full disk or a read-only folder: return the page without keeping it, and render it again next time.
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
    """Return a hash that differs for different parts, also where their concatenation is equal."""
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
