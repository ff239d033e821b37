"""Artifacts that a browser displays: text as text, and images whose first bytes agree with their type."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from litestar import Response
from litestar.exceptions import HTTPException

MOST_TEXT = 2**20
"""Bytes of a text that are displayed; the download has all."""
_MOST_IMAGE = 2**25
_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
# The sandbox keeps markup and scripts of a file from being executed.
_HEADERS = {
    "content-security-policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "content-disposition": "inline",
}


def inline(path: str | PathLike[str]) -> Response[bytes]:
    """Return a file for display. Raises HTTPException 415 for a file that is neither text nor a known image."""
    with Path(path).open("rb") as file:
        content = file.read(_MOST_IMAGE)
    for begin, kind in _IMAGES.items():
        if content.startswith(begin):
            return Response(content, headers=_HEADERS, media_type=kind)
    text = content[:MOST_TEXT].decode("utf-8", "replace")
    # The last character of a cut text may be damaged.
    if "\0" in text or "\N{REPLACEMENT CHARACTER}" in text[:-1]:
        raise HTTPException(status_code=415, detail="the file is neither text nor an image: download it")
    if len(content) > MOST_TEXT:
        text += "\n[cut here: the download has all]"
    return Response(text.encode(), headers=_HEADERS, media_type="text/plain")
