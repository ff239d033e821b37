"""adb's services `root` and `unroot`: which user the device says that its commands run as, and what its build allows.

Commands run as the user of this machine whatever the device says: root on a virtual device is a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT_PROPERTY = "service.adb.root"
"""1 where adbd runs as root, as on Android."""

BUILDS = ("userdebug", "user", "rooted-already")
"""What a virtual device can be: one that adbd can be root on, one that it cannot, one where it is from the start."""


def build_properties(build: str) -> dict[str, str]:
    """Return what `getprop` says of a build, one of BUILDS."""
    user = build == "user"
    return {
        "ro.build.type": "user" if user else "userdebug",
        "ro.build.tags": "release-keys" if user else "test-keys",
        "ro.debuggable": "0" if user else "1",
        ROOT_PROPERTY: "1" if build == "rooted-already" else "0",
    }


def switch_root(properties: Mapping[str, str], *, wanted: bool) -> tuple[str, bool]:
    """Return what adbd answers to `root:` or `unroot:`, and whether it starts anew, with the new user.

    `properties` are the device's. The words are those of AOSP's daemon/restart_service.cpp, which tools look for.
    """
    is_root = properties[ROOT_PROPERTY] == "1"
    if wanted and is_root:
        return "adbd is already running as root\n", False
    if wanted and properties["ro.debuggable"] != "1":
        return "adbd cannot run as root in production builds\n", False
    if not wanted and not is_root:
        return "adbd not running as root\n", False
    return ("restarting adbd as root\n" if wanted else "restarting adbd as non root\n"), True
