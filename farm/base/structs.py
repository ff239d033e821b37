"""msgspec's types made ready before there are threads."""

from __future__ import annotations

import contextlib

import msgspec

_READY = set[type]()
"""Structs that this process, or the process that forked it, has prepared, if they can be decoded."""


def prepare_decoders() -> int:
    """Prepare the decoding of every imported Struct, and return their number.

    msgspec 0.22 analyses a type at its first decoding, and ends the process with SIGSEGV if two threads do so at once.
    Call this before threads begin that decode.
    """
    kinds, seen = [msgspec.Struct], set[type]()
    while kinds:
        for kind in kinds.pop().__subclasses__():
            if kind not in seen:
                seen.add(kind)
                kinds.append(kind)
                if kind in _READY:
                    continue
                _READY.add(kind)
                # Names that only a type checker imports: such a type is never decoded.
                with contextlib.suppress(NameError, TypeError):
                    msgspec.json.Decoder(kind)
    return len(seen)
