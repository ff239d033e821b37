"""How the replies of builders reach the workers that wait for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from waiting import until

from farm.builds.compile.protocol import BuildReply
from farm.dispatch.device_run.builds import builds_folder, has_reply
from farm.dispatch.run.compiling import _Builds

KEY = "a" * 64


class Plan:
    """A run without jobs."""

    jobs = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder


def builds(folder: Path) -> _Builds:
    plan: Any = Plan(folder)
    nothing: Any = None
    return _Builds(plan, nothing, nothing, nothing)


def test_a_reply_that_cannot_be_written_is_left_as_soon_as_it_can(tmp_path: Path) -> None:
    ending = threading.Thread(target=builds(tmp_path).ended, args=(BuildReply(KEY, ok=True, seconds=1.0),))
    ending.start()
    # The folder does not exist yet, which stands for a disk without room.
    ending.join(0.7)
    assert ending.is_alive()
    builds_folder(tmp_path).mkdir()
    until(lambda: has_reply(tmp_path, KEY), "the reply")
    ending.join()


def test_nobody_keeps_at_a_reply_that_is_not_waited_for_any_more(tmp_path: Path) -> None:
    several = builds(tmp_path)
    several.over.set()
    several.ended(BuildReply(KEY, ok=True, seconds=1.0))
    assert not has_reply(tmp_path, KEY)
