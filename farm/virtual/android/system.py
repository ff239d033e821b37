"""The root file system of a device with Android's own daemon and tools: one folder in the cache, for all devices.

adbd, mksh and toybox are packages of Debian. A C library of its own is there as well, so that programs for any Linux of
the same processor run on the device.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import MissingToolError
from farm.system.publish import published
from farm.virtual.android.debian import CONTENTS, unpack
from farm.virtual.android.namespaces import ADBD, SHELL_USER, VERSION, begin_argv
from farm.virtual.tools import LOGCAT, TOOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# libatomic1 is what QNN's libraries for x86-64 need beside a C library; libc-bin has the locale C.UTF-8.
PACKAGES = ("adbd", "busybox-static", "libatomic1", "libc-bin", "mksh", "toybox")
# What Android's own toybox, or its awk, has beside those of Debian's toybox.
_OF_BUSYBOX = ("awk", "bc", "dd", "diff", "expr", "getopt", "more", "tr", "vi")
_MOUNT_POINTS = ("data", "dev", "proc", "product", "sdcard", "sys", "system", "tmp")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
# Numbers and homes as Android's; toybox and adbd look here.
_ETC = {
    "passwd": f"root:x:0:0::/:/system/bin/sh\nshell:x:{SHELL_USER}:{SHELL_USER}::/:/system/bin/sh\n",
    "group": f"root:x:0:\nshell:x:{SHELL_USER}:\n",
    "hosts": "127.0.0.1 localhost\n",
}
_PROBE_SECONDS = 20.0

# No Python runs there, as on a phone. A time, as `MM-DD hh:mm:ss.mmm`, sorts as text.
_LOGCAT = f"""#!/bin/sh
# logcat, as on Android, of one buffer in the form threadtime.
count= since= dump=0
while getopts dct:T:v:b: option; do
    case $option in
        d) dump=1 ;;
        c) : >/{LOGCAT}; exit ;;
        t | T) case $OPTARG in *[!0-9]*) since=$OPTARG ;; *) count=$OPTARG ;; esac
            if [ "$option" = t ]; then dump=1; fi ;;
        v) if [ "$OPTARG" != threadtime ]; then echo "logcat: no form $OPTARG here" >&2; exit 1; fi ;;
        b) ;;
        *) exit 1 ;;
    esac
done
shift $((OPTIND - 1))
if [ $# -gt 0 ]; then echo "logcat: no filters here: $*" >&2; exit 1; fi
if [ "$dump" = 0 ]; then exec tail -n "${{count:-+1}}" -f /{LOGCAT}; fi
echo "--------- beginning of main"
awk -v since="$since" 'substr($0, 1, 18) >= since' /{LOGCAT} | if [ -n "$count" ]; then tail -n "$count"; else cat; fi
"""
_LOG = TOOLS["log"].replace("'+%m-%d %H:%M:%S.%3N'", "'+%m-%d %H:%M:%S.000'")
_TOOLS = {"getprop": TOOLS["getprop"], "dumpsys": TOOLS["dumpsys"], "logcat": _LOGCAT, "log": _LOG}


def android_system(cache_dir: Path, *, also: Sequence[str] = (), log: Callable[[str], None] | None = None) -> Path:
    """Return the folder that devices with a real adbd have as their root, made in the cache where it is not there.

    `also` are further packages of Debian. `log` gets a line about what takes long. Raises MissingToolError, with the
    reason, where such a device cannot be had on this machine: only root can, on Debian, where namespaces are allowed
    and nobody has Android's uid.
    """
    if os.geteuid():
        raise MissingToolError("only root can give a device a root folder and namespaces of its own")
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(SHELL_USER).pw_name
        raise MissingToolError(f"the device's processes would belong to this machine's user {user}: uid {SHELL_USER}")
    unpacked = unpack([*PACKAGES, *also], cache_dir, log=log)
    # Whatever this module lays out otherwise is another folder.
    made_of = (unpacked.parent.name, Path(__file__).read_text(encoding="utf-8"), *_TOOLS.values())
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = published(cache_dir / "debian" / f"android-{key}", lambda new: _fill(new, unpacked))
    _probe(folder)
    return folder


def _fill(folder: Path, unpacked: Path) -> None:
    shutil.copytree(unpacked / "usr", folder / "usr", symlinks=True, copy_function=os.link)
    for name in (*_MOUNT_POINTS, "etc", "tools"):
        (folder / name).mkdir()
    for name, target in _LINKS.items():
        (folder / name).symlink_to(target)
    for name, text in _ETC.items():
        (folder / "etc" / name).write_text(text, encoding="utf-8")
    tools = folder / "tools"
    (folder / "usr/bin/sh").symlink_to("mksh")
    (tools / "sh").symlink_to("/usr/bin/mksh")
    for program, names in (("busybox", _OF_BUSYBOX), ("toybox", _applets(folder))):
        for name in names:
            (tools / name).unlink(missing_ok=True)
            (tools / name).symlink_to(f"/usr/bin/{program}")
    for name, text in _TOOLS.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    # A script begins with `#!/usr/bin/env` on some systems.
    if not (folder / "usr/bin/env").exists():
        (folder / "usr/bin/env").symlink_to("toybox")
    packages = (unpacked.parent / CONTENTS).read_text(encoding="utf-8")
    version = re.search(r"^adbd (\S+)$", packages, re.MULTILINE)
    (folder / VERSION).write_text(version[1] if version else "", encoding="utf-8")


def _applets(folder: Path) -> list[str]:
    """Return the names that toybox runs by."""
    done = subprocess.run(
        ["chroot", folder, "/usr/bin/toybox"], check=False, capture_output=True, text=True, timeout=_PROBE_SECONDS
    )
    names = done.stdout.split()
    if done.returncode != 0 or "ls" not in names:
        raise MissingToolError(f"Debian's toybox does not run here: {done.stderr.strip() or 'it names no applets'}")
    return names


def _probe(folder: Path) -> None:
    """Begin a device and end it at once. Raises MissingToolError where this machine does not let it."""
    with tempfile.TemporaryDirectory(prefix="farm-android-") as scratch:
        for name in ("data", "product", "sdcard", "system/bin", "sys", "proc/sys/kernel/random"):
            Path(scratch, name).mkdir(parents=True)
        Path(scratch, "proc/sys/kernel/random/boot_id").touch()
        try:
            argv = ["unshare", "--net", *begin_argv(folder, Path(scratch), f"test -x {ADBD}")[1:]]
            done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_PROBE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingToolError(f"a device cannot have namespaces of its own here: {error}") from None
    if done.returncode:
        why = done.stderr.strip().partition("\n")[0] or f"exit code {done.returncode}"
        raise MissingToolError(f"a device cannot have namespaces of its own here: {why}")
