"""Options of a delegate, decoded once. Torch-free.

A lowering has six readers of the options, and ExecuTorch starts `flatc` for each of them.
"""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULE = "executorch.backends.qualcomm.serialization.qc_schema_serialize"
_DECODE = "_convert_to_object"


@contextmanager
def options_read_once() -> Iterator[None]:
    """Let ExecuTorch decode the options of a delegate once, and not with a process of `flatc` for each of six readers.

    An ExecuTorch with other functions stays unchanged.
    """
    # A flow for QNN has imported the module.
    module = sys.modules.get(_MODULE)
    decode, found = getattr(module, _DECODE, None), dict[tuple[Any, ...], Any]()
    if not callable(decode):
        yield
        return

    def decode_once(data: bytes, *schema: Any) -> Any:
        key = (bytes(data), *schema)
        if key not in found:
            found[key] = decode(data, *schema)
        # Readers modify the decoded options, so that each gets a copy.
        return copy.deepcopy(found[key])

    with patch.object(module, _DECODE, decode_once):
        yield
