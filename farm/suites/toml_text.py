"""Values of JSON's kinds as text of a manifest."""

from __future__ import annotations

import json
import re

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: object) -> str:
    """Return a value of JSON's kinds as a manifest has it, on one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {toml_value(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    # TOML has no pairs of surrogates, which JSON's escapes would be, and DEL only as an escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: object) -> str:
    return str(name) if _BARE_KEY.fullmatch(str(name)) else json.dumps(str(name))
