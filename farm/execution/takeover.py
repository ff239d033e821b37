"""The new owner of a device ends and removes what former owners left there: runners that still run, and their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.devices.text import clean_text
from farm.errors import DeviceError
from farm.execution.trouble import StagingError

if TYPE_CHECKING:
    from farm.devices.transport import Transport

_SECONDS = 60.0
_OUTPUT_BYTES = 256 * 1024
_STILL_ALIVE = 3

# In the farm's folder. $1: the session that stays. A process belongs to a session when it works in its folder, or
# executes one of its files. One `ls` tells that of all processes; what it says is asked for again of those few that are
# to be ended, as a folder's name can be made to look like a line of it. `rm` follows no link.
_TAKE_OVER = f"""
cd -- "$1" 2>/dev/null || exit 0
root=$(pwd -P) keep=$2
strangers() {{
    ls -l /proc/[0-9]*/cwd /proc/[0-9]*/exe 2>/dev/null | while IFS= read -r line; do
        case $line in
            *" /proc/"*" -> $root/run-"*) ;;
            *) continue ;;
        esac
        pid=${{line#*" /proc/"}}
        pid=${{pid%%/*}}
        case $pid in "" | *[!0-9]*) continue ;; esac
        cwd=$(readlink "/proc/$pid/cwd" 2>/dev/null) exe=$(readlink "/proc/$pid/exe" 2>/dev/null)
        case $cwd/ in "$root/$keep/"*) continue ;; esac
        case $exe/ in "$root/$keep/"*) continue ;; esac
        case $cwd in "$root/run-"*) echo "$pid"; continue ;; esac
        case $exe in "$root/run-"*) echo "$pid" ;; esac
    done
}}
tries=0
while left=$(strangers); [ -n "$left" ]; do
    if [ "$tries" -ge 100 ]; then echo $left; exit {_STILL_ALIVE}; fi
    kill -9 $left 2>/dev/null
    tries=$((tries + 1))
    sleep 0.1
done
for folder in run-*; do
    if [ "$folder" != "$keep" ]; then rm -rf -- "$folder"; fi
done
true
"""


def take_over(transport: Transport, session: str) -> None:
    """End every runner that is not of the folder `session`, wait until it is gone, and remove its folder.

    For the owner of a lease only: it takes everything from others who use the device. Raises DeviceError, also for a
    process that does not end.
    """
    argv = ["sh", "-c", _TAKE_OVER, "sh", str(transport.storage), session]
    done = transport.run(argv, timeout_s=_SECONDS, max_output=_OUTPUT_BYTES)
    if done.code == _STILL_ALIVE:
        raise StagingError(
            transport.serial,
            f"a former owner's processes do not end, not even by SIGKILL: {clean_text(done.stdout)}: reboot it",
        )
    if done.code != 0:
        problem = "what a former owner left cannot be removed"
        raise DeviceError(transport.serial, problem, code=done.code, stderr=clean_text(done.stderr))
