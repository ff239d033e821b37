"""Program that loads a QNN library of this machine and prints the library's API version and build id, as JSON.

A separate process is needed because such a library cannot be unloaded, and because LD_LIBRARY_PATH must be set before
the process starts. The program imports nothing of farm.
"""

from __future__ import annotations

import ctypes
import json
import sys

# QnnInterface_t: {uint32 backendId; const char* providerName; uint32 apiVersion[6]; void* fn[]}.
_GET_BUILD_ID = 4


class _Interface(ctypes.Structure):
    _fields_ = (
        ("backend_id", ctypes.c_uint32),
        ("provider", ctypes.c_char_p),
        ("core_version", ctypes.c_uint32 * 3),
        ("backend_version", ctypes.c_uint32 * 3),
        ("functions", ctypes.c_void_p * (_GET_BUILD_ID + 1)),
    )


def main(path: str) -> None:
    """Print `{"core_api": [major, minor, patch], "build_id": "v2.51.0...."}`. Raises OSError when it does not load."""
    library = ctypes.CDLL(path)
    providers = ctypes.POINTER(ctypes.POINTER(_Interface))()
    count = ctypes.c_uint32()
    error = library.QnnInterface_getProviders(ctypes.byref(providers), ctypes.byref(count))
    if error or not count.value:
        raise OSError(f"QnnInterface_getProviders gives {count.value} providers and error {error}")
    interface = providers[0].contents
    build_id = ctypes.c_char_p()
    get_build_id = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.POINTER(ctypes.c_char_p))(
        interface.functions[_GET_BUILD_ID]
    )
    get_build_id(ctypes.byref(build_id))
    answer = {"core_api": list(interface.core_version), "build_id": (build_id.value or b"").decode(errors="replace")}
    # On a line of its own: the library prints too.
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
