"""How the replies of builders reach the workers that wait for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from waiting import until

from farm.builds.compile.protocol import BuildReply
from farm.dispatch.request.plan import RunPlan
from farm.dispatch.run.compiling import _Builds

KEY = "a" * 64


def test_a_reply_that_cannot_be_written_is_left_as_soon_as_it_can(tmp_path: Path) -> None:
    plan = RunPlan("run", tmp_path, tmp_path, (), (), {}, tmp_path)
    nothing: Any = None
    builds = _Builds(plan, nothing, nothing, nothing, nothing)
    ending = threading.Thread(target=builds.ended, args=(BuildReply(KEY, ok=True, seconds=1.0),))
    ending.start()
    # The folder does not exist yet, which stands for a disk without room.
    ending.join(0.7)
    assert ending.is_alive()
    (tmp_path / "builds").mkdir()
    until((tmp_path / "builds" / f"{KEY}.json").exists, "the reply")
    ending.join()
