"""Run as a program: calls QnnDevice_create of a library with one custom config and prints its result.

Arguments: the library, `option` of the config, `option` of the custom config, and its second word.
"""

from __future__ import annotations

import ctypes
import sys


class Interface(ctypes.Structure):
    _fields_ = (("header", ctypes.c_char * 40), ("functions", ctypes.c_void_p * 72))


class Config(ctypes.Structure):
    _fields_ = (("option", ctypes.c_uint32), ("custom", ctypes.c_void_p))


path, option, custom_option, word = sys.argv[1], *map(int, sys.argv[2:])
library = ctypes.CDLL(path)
providers = ctypes.POINTER(ctypes.POINTER(Interface))()
count = ctypes.c_uint32()
library.QnnInterface_getProviders.restype = ctypes.c_uint64
error = library.QnnInterface_getProviders(ctypes.byref(providers), ctypes.byref(count))
if error:
    sys.exit(f"error {error}")
create = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    providers[0].contents.functions[40]
)
custom = (ctypes.c_uint32 * 8)(custom_option, word)
config = Config(option, ctypes.cast(custom, ctypes.c_void_p))
configs = (ctypes.POINTER(Config) * 2)(ctypes.pointer(config))
returned = create(None, configs, None)
print(returned & 0xFFFFFFFF, returned >> 32, create(None, None, None))  # noqa: T201
