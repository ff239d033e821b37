"""Files of a virtual device, a folder of this machine, and the programs of Android that farm asks for."""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from farm.devices.virtual.faults import LOG

# Programs and files of Android that farm asks a device for, as far as a virtual device has them: scripts and texts.


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

# Without it, the name would be this machine's own program where that is in /usr/bin.
_REBOOT = """#!/bin/sh
echo "reboot: a virtual device is rebooted by 'adb reboot'" >&2
exit 1
"""

_GETENFORCE = """#!/bin/sh
# getenforce, as on Android. A virtual device has no SELinux.
echo Disabled
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
    "reboot": _REBOOT,
    "getenforce": _GETENFORCE,
    "sha256sum": _SHA256SUM,
}
"""Scripts that are always in /system/bin."""

DF = "system/bin/df"


def full_df(free_bytes: int) -> str:
    """Return a script for the device's df by which every file system has `free_bytes` left."""
    return f"""#!/bin/sh
PATH=/usr/bin:/bin df "$@" | while IFS= read -r line; do
    case $line in
        [Ff]ilesystem*) printf '%s\\n' "$line" ;;
        *) set -- $line; echo "$1 $2 $2 {free_bytes // 1024} 100% $6" ;;
    esac
done
"""


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


# The files of a virtual device: a folder of this machine that stands for the device's root.


# Names on a device are bytes, which pathlib does not take.
# ruff: noqa: PTH103, PTH108, PTH118, PTH208


# The path goes into shell commands and lists of folders unquoted: no character may be special in either.
_SAFE_ROOT = re.compile(r"/[A-Za-z0-9/._+,@-]+")

# The folders that a command may name, which are elsewhere on this machine. Only as whole words of a path.
_MAPPED = re.compile(
    rb"(?<![\w./-])(/data/local/tmp|/system/bin|/sys/class/thermal|/proc/sys/kernel/random/boot_id)(?![\w.-])"
)

_FOLDERS = ("data/local/tmp", "sdcard", "system/bin")
_INCOMING = b".incoming"
# In the root folder, and no file of the device.
_HIDDEN = frozenset({_INCOMING, LOG.encode()})

ROOT_PROPERTY = "service.adb.root"
"""1 where adbd runs as root, as on Android."""

BUILDS = ("userdebug", "user", "rooted-already", *SU)
"""Builds of virtual devices: adbd can become root, cannot, is root from the start; and the builds of SU, in which `su`
can and adbd cannot."""
_BUILD_PROPERTY = "farm.build"

BOOT_ID_PROPERTY = "farm.boot_id"
"""Property with the boot id of the device, as its /proc is this machine's."""

REASON_PROPERTY = "sys.boot.reason"
"""Property with the reason of the last boot."""


class DeviceTree:
    """Paths of a device as paths of this machine. Every path is bytes: a name may be any bytes but NUL and /."""

    def __init__(self, root: Path, properties: Mapping[str, str]) -> None:
        """Make the folders and the properties; files of an earlier life stay. Raises ValueError for a bad `root`."""
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Pushed files are writable for all users, as on a phone: this folder keeps other users out.
        root.chmod(0o700)
        path = str(root.resolve())
        if not _SAFE_ROOT.fullmatch(path):
            raise ValueError(
                f"{path} cannot hold a virtual device: only letters, digits and /._+,@- may be in its path"
            )
        self.root = os.fsencode(path)
        for folder in _FOLDERS:
            Path(path, folder).mkdir(parents=True, exist_ok=True)
        self._incoming = os.path.join(self.root, _INCOMING)
        os.makedirs(self._incoming, 0o700, exist_ok=True)
        # Partial uploads of a killed device.
        for name in os.listdir(self._incoming):
            os.unlink(os.path.join(self._incoming, name))
        self.properties = dict(properties)
        for command, script in TOOLS.items():
            self.write(f"system/bin/{command}", script, mode=0o755)
        self.remove(DF)
        self.remove("system/bin/su")
        if su := SU.get(properties.get(_BUILD_PROPERTY, "")):
            self.write("system/bin/su", su, mode=0o755)
        self.set_body(HEALTHY_LEVEL, HEALTHY_CELSIUS)
        self.begin_life()

    def set_property(self, name: str, value: str) -> None:
        """Set the value of a property atomically."""
        self.properties[name] = value
        self.write("system/build.prop", "".join(f"{key}={text}\n" for key, text in self.properties.items()))

    def begin_life(self, reason: str = "reboot") -> None:
        """Begin a boot of the device with its reason: a new boot id and an empty log."""
        random = os.urandom(16).hex()
        boot_id = "-".join((random[:8], random[8:12], random[12:16], random[16:20], random[20:]))
        self.write(BOOT_ID, f"{boot_id}\n")
        self.set_property(BOOT_ID_PROPERTY, boot_id)
        self.set_property(REASON_PROPERTY, reason)
        self.write(LOGCAT, "")
        self.log("boot", f"the device has started: {reason}")

    def log(self, tag: str, message: str) -> None:
        """Add a line of the device itself to the log of `logcat`."""
        now = time.time()
        moment = time.strftime("%m-%d %H:%M:%S", time.localtime(now))
        text = " ".join(message.split())
        line = f"{moment}.{int(now * 1000) % 1000:03d} {os.getpid():5d} {os.getpid():5d} I {tag:<8}: {text}\n"
        with Path(os.fsdecode(self.root), LOGCAT).open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(line)

    def set_body(self, level: int, celsius: int) -> None:
        """Let the battery have `level` percent, and it and the processor be so warm."""
        self.write(BATTERY, battery(level, celsius))
        self.write(f"{THERMAL}/type", "cpu-0-0\n")
        self.write(f"{THERMAL}/temp", f"{celsius * 1000}\n")

    def write(self, name: str, text: str, *, mode: int = 0o644) -> None:
        """Make a file of the device, a path relative to its root, at once and whole."""
        place, new = Path(os.fsdecode(self.root), name), Path(os.fsdecode(self.new_upload()))
        place.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.chmod(mode)
        new.replace(place)

    def remove(self, name: str) -> None:
        """Remove a file of the device, if it is there."""
        Path(os.fsdecode(self.root), name).unlink(missing_ok=True)

    def resolve(self, path: bytes, *, follow: bool = True) -> bytes:
        """Return where `path` of the device is here; `follow` a link in its last place. Raises OSError outside."""
        if b"\0" in path:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        wanted = os.path.join(self.root, path.lstrip(b"/"))
        folder, name = os.path.split(wanted)
        whole = follow or name in {b"", b".", b".."}
        real = os.path.realpath(wanted) if whole else os.path.join(os.path.realpath(folder), name)
        if real != self.root and not real.startswith(self.root + b"/"):
            raise PermissionError(errno.EACCES, "the path leads out of the device")
        if real[len(self.root) + 1 :].partition(b"/")[0] in _HIDDEN:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real

    def names(self, folder: bytes) -> list[bytes]:
        """Return the names in a folder of `resolve`, `.` and `..` included, as adbd does."""
        inside = [name for name in os.listdir(folder) if folder != self.root or name not in _HIDDEN]
        return [b".", b"..", *sorted(inside)]

    def new_upload(self) -> bytes:
        """Return a path that nothing has, on the same file system, where an upload grows until it is whole."""
        return os.path.join(self._incoming, os.urandom(8).hex().encode())

    def map_command(self, command: bytes) -> bytes:
        """Return a shell command with the folders of the device replaced by where they are here."""
        return _MAPPED.sub(lambda match: self.root + match[1], command)

    def environment(self) -> dict[bytes, bytes]:
        """Return the environment of a command: nothing of this machine's but where its tools are."""
        tmp = os.path.join(self.root, b"data/local/tmp")
        return {
            b"PATH": os.path.join(self.root, b"system/bin") + b":/usr/local/bin:/usr/bin:/bin",
            b"HOME": tmp,
            b"TMPDIR": tmp,
            b"ANDROID_DATA": os.path.join(self.root, b"data"),
            b"ANDROID_ROOT": os.path.join(self.root, b"system"),
            b"LANG": b"C.UTF-8",
        }


def device_properties(soc: str, serial: str, version: str, build: str = BUILDS[0]) -> dict[str, str]:
    """Return the properties of a device; `version` is farm's and part of the build; `build` is from BUILDS."""
    production = build == "user" or build in SU
    kind, tags = ("user", "release-keys") if production else ("userdebug", "test-keys")
    abi = {"x86_64": "x86_64", "aarch64": "arm64-v8a"}.get(os.uname().machine, os.uname().machine)
    device = f"virtual_{soc.lower()}"
    return {
        "ro.soc.manufacturer": "QTI",
        "ro.soc.model": soc,
        "ro.product.manufacturer": "farm",
        "ro.product.brand": "farm",
        "ro.product.model": f"Virtual {soc}",
        "ro.product.name": serial,
        "ro.product.device": device,
        "ro.product.cpu.abi": abi,
        "ro.product.cpu.abilist": abi,
        "ro.build.version.release": "15",
        "ro.build.version.sdk": "35",
        "ro.build.type": kind,
        "ro.build.tags": tags,
        "ro.debuggable": "0" if production else "1",
        ROOT_PROPERTY: "1" if build == "rooted-already" else "0",
        "ro.build.fingerprint": f"farm/{device}/{device}:15/VIRTUAL.{version}/1:{kind}/{tags}",
        "ro.serialno": serial,
        "ro.boot.serialno": serial,
        "sys.boot_completed": "1",
        "ro.farm.virtual": "1",
        _BUILD_PROPERTY: build,
    }
