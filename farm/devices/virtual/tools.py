"""Programs and files of Android that farm asks a device for, as far as a virtual device has them: scripts and texts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from farm.devices.virtual.faults import CONTROL

_GETPROP = """#!/bin/sh
# getprop, as on Android: all properties, or the named property, or its default.
file="${0%/bin/getprop}/build.prop"
if [ $# -eq 0 ]; then
    exec sed 's/^\\([^=]*\\)=\\(.*\\)$/[\\1]: [\\2]/' "$file"
fi
while IFS= read -r line; do
    case $line in "$1="*)
        printf '%s\\n' "${line#*=}"
        exit
    esac
done <"$file"
printf '%s\\n' "${2-}"
"""

# `id` with toybox's text for adbd's two users, and this machine's text for others.
_ID = """#!/bin/sh
# id, as on Android: the user of commands according to adbd or su.
if [ "${VIRTUAL_USER-}" = root ] || [ "$("${0%/id}/getprop" service.adb.root)" = 1 ]; then
    number=0 name=root
else
    number=2000 name=shell
fi
case "$*" in
    -u | -g | -G) echo "$number" ;;
    -un | -gn | -Gn) echo "$name" ;;
    "") echo "uid=$number($name) gid=$number($name) groups=$number($name)" ;;
    *) PATH=/usr/bin:/bin exec id "$@" ;;
esac
"""

_DUMPSYS = """#!/bin/sh
# dumpsys, as on Android, of which there is the battery alone.
if [ "${1-}" = battery ]; then
    exec cat "${0%/bin/dumpsys}/battery"
fi
echo "Can't find service: ${1-}" >&2
"""

# Each takes what its model takes: the other's words end in an error there as well.
_SU_OF_AOSP = """#!/bin/sh
# su, as AOSP's system/extras has it: WHO and a program with its words. Root is a word here: see id.
if [ "${1-}" != 0 ]; then
    echo "su: invalid uid/gid '${1-}'" >&2
    exit 1
fi
shift
VIRTUAL_USER=root exec "$@"
"""
_SU_OF_MAGISK = """#!/bin/sh
# su, as Magisk has it: -c and a script. Root is a word here: see id.
if [ "${1-}" != -c ]; then
    echo "su: user ${1-} not found" >&2
    exit 1
fi
VIRTUAL_USER=root exec /bin/sh -c "$2"
"""

SU = {"rooted-by-su": _SU_OF_AOSP, "rooted-by-magisk": _SU_OF_MAGISK}
"""Content of /system/bin/su by build."""

LOGCAT = "data/misc/logd/logcat"
"""File of the device's log, one line each in the form `threadtime`."""

_PROGRAM = shlex.join([sys.executable, "-IS", str(Path(__file__).with_name("logcat.py"))])
_LOGCAT = f"""#!/bin/sh
# logcat, as on Android, of one buffer.
exec {_PROGRAM} "${{0%/system/bin/logcat}}/{LOGCAT}" "$@"
"""

_LOG = f"""#!/bin/sh
# log, as on Android: -t TAG, -p PRIORITY, and words.
tag=log priority=I
while getopts t:p: option; do
    case $option in t) tag=$OPTARG ;; p) priority=$(printf %.1s "$OPTARG" | tr a-z A-Z) ;; *) exit 1 ;; esac
done
shift $((OPTIND - 1))
printf '%s %5d %5d %s %-8s: %s\\n' "$(date '+%m-%d %H:%M:%S.%3N')" $$ $$ "$priority" "$tag" "$*" \\
    >>"${{0%/system/bin/log}}/{LOGCAT}"
"""

_REMOUNT = """#!/bin/sh
# remount, as on Android: any user who may write may write in /system, which is an ordinary folder here.
if [ "$("${0%/remount}/id" -u)" != 0 ]; then
    echo 'Not running as root. Try "adb root" first.' >&2
    echo "remount failed" >&2
    exit 1
fi
echo "remount succeeded"
"""

# Without it, the name would be this machine's own program where that is in /usr/bin.
_REBOOT = f"""#!{sys.executable} -IS
# reboot, as on Android: the device starts anew, for the reason MODE.
import json, os, socket, sys
bin = os.path.dirname(os.path.realpath(sys.argv[0]))
folder = os.open(os.path.join(bin, "../.."), os.O_PATH)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(f"/proc/self/fd/{{folder}}/{CONTROL}")
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    connection.sendall(json.dumps({{"do": "reboot", "mode": mode}}).encode() + b"\\n")
    answer = json.loads(connection.makefile().readline() or "{{}}")
if "error" in answer:
    sys.exit("reboot: " + answer["error"])
"""

_GETENFORCE = """#!/bin/sh
# getenforce, as on Android. A virtual device has no SELinux.
exec "${0%/getenforce}/getprop" farm.selinux Disabled
"""

# For a few files, openssl takes longer to start than coreutils to hash.
_SHA256SUM = r"""#!/bin/sh
# sha256sum, as fast as on a phone, whose processor has instructions for it: coreutils may not use this machine's.
if [ $# -gt 9 ] && [ "$1" = -- ] && [ -x /usr/bin/openssl ]; then
    hashes=$(/usr/bin/openssl dgst -sha256 -r "$@")
    code=$?
    [ -z "$hashes" ] || printf '%s\n' "$hashes" | sed 's/ \*/  /'
    exit "$code"
else
    PATH=/usr/bin:/bin exec sha256sum "$@"
fi
"""

TOOLS = {
    "getprop": _GETPROP,
    "id": _ID,
    "dumpsys": _DUMPSYS,
    "logcat": _LOGCAT,
    "log": _LOG,
    "remount": _REMOUNT,
    "reboot": _REBOOT,
    "getenforce": _GETENFORCE,
    "sha256sum": _SHA256SUM,
}
"""Scripts that are always in /system/bin."""

_DF = """#!/bin/sh
# df of a device whose storage is full, or nearly: every file system has so many bytes left.
left="$("${0%/df}/getprop" farm.free_bytes)"
PATH=/usr/bin:/bin df "$@" | while IFS= read -r line; do
    case $line in
        [Ff]ilesystem*) printf '%s\\n' "$line" ;;
        *) set -- $line; echo "$1 $2 $2 $((left / 1024)) 100% $6" ;;
    esac
done
"""

_DATE = """#!/bin/sh
# date of a device whose clock is wrong.
for word; do
    case $word in -d* | -r* | -s* | --date* | --reference* | --set*) PATH=/usr/bin:/bin exec date "$@" ;; esac
done
now="$(PATH=/usr/bin:/bin date +%s.%N)"
skew="$("${0%/date}/getprop" farm.clock_skew_s)"
PATH=/usr/bin:/bin exec date -d "@$((${now%.*} + skew)).${now#*.}" "$@"
"""

# Times of files are kept as they are, and shown off by the skew: then `touch` and `find -mmin` agree with `date`.
_STAT = f"""#!{sys.executable} -IS
# stat of a device whose clock is wrong.
import os, re, subprocess, sys
bin = os.path.dirname(sys.argv[0])
with open(os.path.join(os.path.dirname(bin), "build.prop"), "rb") as file:
    skew = int(re.search(rb"^farm.clock_skew_s=(-?\\d+)$", file.read(), re.M)[1])
words = [os.fsencode(word) for word in sys.argv[1:]]
for number, word in enumerate(words):
    if number and words[number - 1] == b"-c" or word.startswith((b"-c", b"--format=", b"--printf=")):
        words[number] = re.sub(rb"%([XYZ])", lambda found: b"\\1" + found[0] + b"\\1", word)
done = subprocess.run([b"/usr/bin/stat", *words], stdout=subprocess.PIPE)
shown = re.sub(b"\\1([0-9]+)\\1", lambda found: b"%d" % (int(found[1]) + skew), done.stdout)
sys.stdout.buffer.write(shown)
sys.exit(done.returncode)
"""

_GETCONF = """#!/bin/sh
# getconf of a device with larger memory pages.
case "$*" in
    PAGE_SIZE | PAGESIZE) exec "${0%/getconf}/getprop" farm.page_bytes ;;
    *) PATH=/usr/bin:/bin exec getconf "$@" ;;
esac
"""

DENIAL = (
    'avc:  denied  { read } for comm="farm_runner" name="fastrpc-cdsp" dev="tmpfs" '
    "scontext=u:r:shell:s0 tcontext=u:object_r:vendor_qdsp_device:s0 tclass=chr_file permissive=0"
)
"""Line of the log about a program that SELinux stops, as Android's auditd writes it."""

FAULTY_TOOLS = {"df": _DF, "date": _DATE, "stat": _STAT, "getconf": _GETCONF}
"""Scripts that replace this machine's tools during a fault, as those would show true values."""

BATTERY = "system/battery"
THERMAL = "sys/class/thermal/thermal_zone0"
BOOT_ID = "proc/sys/kernel/random/boot_id"

HEALTHY_LEVEL = 100
HEALTHY_CELSIUS = 25


def battery(level: int, celsius: int) -> str:
    """Return the output of `dumpsys battery` of Android 15: percent, and tenths of a degree."""
    return f"""Current Battery Service state:
  AC powered: false
  USB powered: true
  Wireless powered: false
  Dock powered: false
  Max charging current: 500000
  Max charging voltage: 5000000
  Charge counter: {level * 39000}
  status: 2
  health: {3 if celsius >= 50 else 2}
  present: true
  level: {level}
  scale: 100
  voltage: 4300
  temperature: {celsius * 10}
  technology: Li-ion
"""


HOSTILE_NAMES = (
    b"-rf",
    b"$(reboot)",
    b"`reboot`",
    b"; reboot #",
    b"a b",
    b"'\"",
    b"*",
    b"\x1b[31mred\x1b[0m",
    "\N{RIGHT-TO-LEFT OVERRIDE}gnp.exe".encode(),
    b"\xff\xfe",
    b"x" * 255,
    # Looks like a line of a listing of its own: size, time and the name of an object.
    b"1 1 x\n5 1 " + b"a" * 64,
)
"""Names that a file can have and hardly any program expects."""

IMPOSSIBLE_NAMES = (b"../../outside", b"/data/outside")
"""Names that no file has, and that a device can list all the same."""

HOSTILE_FOLDERS = ("data/local/tmp", "data/local/tmp/farm", "data/local/tmp/farm/objects")
"""Folders that get files with HOSTILE_NAMES, if they exist."""
