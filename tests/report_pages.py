"""Access to the packed parts of a report, for tests."""

from __future__ import annotations

import base64
import json
import re
import zlib

_PACK = re.compile(r'<script type="application/octet-stream" class="pages"[^>]*>([^<]*)</script>')


def unpacked(html: str) -> dict[int, str]:
    """Return the pages of jobs that a report shows on demand, by the job's place."""
    pages: dict[int, str] = {}
    for data in _PACK.findall(html):
        pages |= {int(place): page for place, page in json.loads(zlib.decompress(base64.b64decode(data))).items()}
    return pages


def in_full(html: str) -> str:
    """Return a report followed by its unpacked parts."""
    return html + "".join(unpacked(html).values())
