"""Stub of the Hexagon SDK's elfsigner.py, which is not available here: same questions, and a real hash segment.

The segment proves nothing to a device. The file `stub_mode` beside the stub has its misbehaviour; `stub_starts` counts
its starts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SECRET = "stub of a private key"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def ask() -> None:
    while True:
        sys.stdout.write(
            "\n        Attention:\n        Use of this tool is conditioned upon ...\n\n        Agree? [y/n]:\n"
        )
        choice = input().lower()
        if choice in ("y", "yes"):
            return
        if choice in ("n", "no"):
            sys.exit(2)


def signed(content: bytes) -> bytes:
    """The same ELF file of 32 bits with its table of program headers at its end, two longer, and hashes behind it."""
    (table,) = struct.unpack_from("<I", content, 28)
    size, count = struct.unpack_from("<HH", content, 42)
    headers = content[table : table + size * count]
    content += bytes(-len(content) % 4)
    start = len(content)
    hashes_at = start + size * (count + 2)
    fields = [struct.unpack_from("<8I", headers, size * i) for i in range(count)]
    hashes = b"".join(hashlib.sha256(content[one[1] : one[1] + one[4]]).digest() for one in fields)
    new = struct.pack("<8I", 0, 0, 0, 0, 52 + len(headers), 0, 7 << 24, 0)
    new += struct.pack("<8I", 0, hashes_at, 0, 0, len(hashes), len(hashes), 0x02200000, 4096)
    made = bytearray(content + new + headers + hashes)
    struct.pack_into("<I", made, 28, start)
    struct.pack_into("<H", made, 44, count + 2)
    return bytes(made)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-i", dest="image", type=Path, required=True)
    parser.add_argument("-o", dest="output", type=Path, required=True)
    given = parser.parse_args()
    mode = (HERE / "stub_mode").read_text().strip()
    with (HERE / "stub_starts").open("a") as file:
        file.write("started\n")
    ask()
    if mode == "asks twice":
        ask()
    while mode == "asks without end":
        ask()
    say(f"Logging to {given.output / 'Elfsigner_log.txt'}")
    say(f"environment: {' '.join(sorted(os.environ))}")
    sys.stdout.flush()
    sys.stderr.write("a bell \a and \x1b[31mred\n")
    keys = given.output / "secimage_output"
    keys.mkdir(parents=True)
    (keys / "attestation.key").write_text(SECRET)
    (given.output / "Elfsigner_log.txt").write_text(SECRET)
    if mode == "hangs":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    if mode == "fails":
        say("ERROR: Signing failed!")
        return 1
    made = given.output / given.image.name
    content = given.image.read_bytes()
    if mode == "leaves a link":
        made.symlink_to(given.image)
    elif mode == "leaves it unsigned":
        made.write_bytes(content)
    elif mode == "signs another":
        made.write_bytes(signed(content[:36] + struct.pack("<I", 0x68) + content[40:]))
    elif mode == "is cut short":
        made.write_bytes(signed(content)[:-8])
    elif mode != "leaves nothing":
        made.write_bytes(signed(content))
    if mode == "signs and fails":
        return 1
    say(f"Signing complete! Output saved at {made}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
