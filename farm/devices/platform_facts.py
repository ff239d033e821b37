"""Facts of a device's system that decide whether programs run there: page size, SELinux, access to the DSP."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import DeviceError
from farm.base.text import count_of
from farm.devices.text import clean_text, named_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farm.devices.transport import Transport

_SECONDS = 20.0
_ANSWER_BYTES = 64 * 1024
_MOST_PAGE_BYTES = 1 << 20
_MOST_DENIALS = 5
_DENIAL = re.compile(r"avc: {1,8}denied .{0,200}(?:farm_runner|qnn_executor|fastrpc|adsprpc).{0,200}")

# Nodes of FastRPC's driver for the compute DSP, on newer and on older kernels.
_NODES = "/dev/fastrpc-cdsp /dev/fastrpc-cdsp-secure /dev/adsprpc-smd /dev/adsprpc-smd-secure"
# Source of the page size without getconf: the kernel.
_SCRIPT = f"""
page=$(getconf PAGE_SIZE 2>/dev/null)
[ -n "$page" ] || page=$(($(sed -n 's/^KernelPageSize: *\\([0-9]*\\) kB$/\\1/p' /proc/self/smaps | head -n 1) * 1024))
echo "page=$page"
echo "selinux=$(getenforce 2>/dev/null || cat /sys/fs/selinux/enforce 2>/dev/null)"
for node in {_NODES}; do
    [ -e "$node" ] && if [ -r "$node" ]; then echo "node=$node"; else echo "closed=$node"; fi
done
for file in /vendor/lib64/libcdsprpc.so /system/vendor/lib64/libcdsprpc.so /usr/lib/libcdsprpc.so*; do
    [ -e "$file" ] && echo "fastrpc=$file"
done
echo "end=1"
"""


class PlatformFacts(msgspec.Struct, frozen=True):
    """Facts of a device's system; empty or 0 for unreported ones."""

    page_bytes: int = 0
    """Size of a memory page."""
    selinux: str = ""
    """State of SELinux: Enforcing, Permissive or Disabled."""
    nodes: tuple[str, ...] = ()
    """Device nodes of FastRPC that this user may read."""
    closed_nodes: tuple[str, ...] = ()
    """Device nodes of FastRPC that this user may not read."""
    fastrpc: tuple[str, ...] = ()
    """Libraries of FastRPC on the device."""


def read_platform(transport: Transport) -> PlatformFacts:
    """Ask a device for the facts of its system. Raises DeviceError."""
    done = transport.run(["sh", "-c", _SCRIPT], timeout_s=_SECONDS, max_output=_ANSWER_BYTES)
    values = named_values(done.stdout.split(b"\n"))
    if "end" not in values:
        stderr = done.stderr.decode(errors="replace")
        raise DeviceError(transport.serial, "does not answer about its system", code=done.code, stderr=stderr)
    return parse_platform(values)


def parse_platform(values: Mapping[str, Sequence[str]]) -> PlatformFacts:
    """Return the facts in the values of a device's answer. Pure."""
    page = count_of(values.get("page", [""])[0]) or 0
    plausible = 0 < page <= _MOST_PAGE_BYTES and page & (page - 1) == 0
    selinux = values.get("selinux", [""])[0]
    return PlatformFacts(
        page if plausible else 0,
        {"0": "Permissive", "1": "Enforcing"}.get(selinux, selinux),
        tuple(values.get("node", ())),
        tuple(values.get("closed", ())),
        tuple(dict.fromkeys(values.get("fastrpc", ()))),
    )


def denials(logs: Iterable[str]) -> tuple[str, ...]:
    """Return the newest lines of `logs` in which SELinux denies something to a runner, or at the DSP. Pure."""
    found = (_DENIAL.search(line) for log in logs for line in log.splitlines())
    return tuple(dict.fromkeys(clean_text(one[0]) for one in found if one is not None))[-_MOST_DENIALS:]
