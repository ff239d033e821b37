"""`python -IS without_vsock.py PROGRAM WORD...`: execute a program that can open no socket of AF_VSOCK.

adbd listens on one, which no namespace isolates: every user of the machine could connect to it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

# linux/prctl.h and linux/seccomp.h.
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
# AUDIT_ARCH_* of linux/audit.h and the number of socket(2), by processor.
_SOCKET_CALL = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_AF_VSOCK, _EAFNOSUPPORT = 40, 97


def main() -> None:
    arch, call = _SOCKET_CALL[os.uname().machine]
    # linux/filter.h: load a word of seccomp_data, jump if equal, return.
    load, equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | _EAFNOSUPPORT
    program = [
        (load, 0, 0, 4), (equal, 0, 5, arch),
        (load, 0, 0, 0), (equal, 0, 3, call),
        (load, 0, 0, 16), (equal, 0, 1, _AF_VSOCK),
        (give, 0, 0, refuse), (give, 0, 0, allow),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc, zero = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
    for words in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), filters, zero, zero),
    ):
        if libc.prctl(*words):
            sys.exit(f"sockets of AF_VSOCK cannot be refused: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the words are a test's


main()
