"""Stands in for an SFTP server that lies: it has one file of five bytes, and the lie is named by the file argv[1]."""

from __future__ import annotations

import itertools
import struct
import sys
import time
from pathlib import Path

VERSION, OPEN, READ, STAT = 2, 3, 5, 17
STATUS, HANDLE, DATA, ATTRIBUTES = 101, 102, 103, 105
END_OF_FILE = 1


def string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def answer(lie: str, kind: int) -> tuple[int, bytes]:
    """Return type and content of the answer to a request, after its number."""
    if lie == "wrong kind":
        return HANDLE, string(b"handle")
    if kind == STAT:
        if lie == "no size":
            return ATTRIBUTES, struct.pack(">II", 4, 0o100644)
        return ATTRIBUTES, struct.pack(">IQI", 1 | 4, 1 << 63 if lie == "huge" else 5, 0o100644)
    if kind == OPEN:
        return HANDLE, struct.pack(">I", 1000) + b"handle" if lie == "long string" else string(b"handle")
    if kind == READ:
        data = {"too much": b"123456", "too little": b"123", "empty data": b""}.get(lie, b"12345")
        return DATA, string(data)
    return STATUS, struct.pack(">I", 0) + string(b"Success") + string(b"")


def main() -> None:
    lie = Path(sys.argv[1]).read_text()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    if lie == "greeting":
        answers.write(b"Welcome to this board!\n")
    read_before = False
    while len(head := requests.read(4)) == 4:
        body = requests.read(struct.unpack(">I", head)[0])
        kind, number = body[0], body[1:5]
        if kind == 1:
            packet = bytes([VERSION]) + struct.pack(">I", 2 if lie == "version" else 3)
        elif lie == "ends":
            return
        elif lie == "drip":
            for piece in itertools.chain([struct.pack(">I", 4096)], itertools.repeat(b"x", 4096)):
                answers.write(piece)
                answers.flush()
                time.sleep(0.01)
            return
        elif lie == "silence":
            time.sleep(60)
            return
        elif lie == "endless packet":
            packet = b"x" * 4096
            answers.write(b"\xff" * 4)
        elif lie == "too little" and kind == READ and read_before:
            packet = bytes([STATUS]) + number + struct.pack(">I", END_OF_FILE) + string(b"End of file") + string(b"")
        else:
            read_before |= kind == READ
            what, fields = answer(lie, kind)
            packet = bytes([what]) + (b"\0\0\xff\xff" if lie == "other number" else number) + fields
        answers.write(struct.pack(">I", len(packet)) + packet)
        answers.flush()


if __name__ == "__main__":
    main()
