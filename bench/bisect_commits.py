"""How many of 24 commits `farm bisect --commits` compiles until each of four defects has its commit.

    python bench/bisect_commits.py            all four, a quarter of an hour and more
    python bench/bisect_commits.py --quick    the one that does not compile

The checkout is made of the installed ExecuTorch (tests/bisected_history.py). Every search begins without
bundles, as nothing that another one compiled is to count. The last line is one JSON object: bisect_builds, the most
that any search compiled, the ends among them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from empty_cache import make_empty_cache

from farm.config.settings import load_config

_ROOT = Path(__file__).resolve().parents[1]


def figures_bisect(*, quick: bool = False) -> dict[str, int]:
    """Return how many commits were compiled at most. Raises SystemExit where a commit is not the right one."""
    sys.path.insert(0, str(_ROOT / "tests"))
    parts = load_config().cache_dir
    from bisected_history import COMPILE, IMPORT, JOBS, make_history

    most = 0
    with tempfile.TemporaryDirectory(prefix="farm-bisect-") as text:
        folder = Path(text)
        first, defects = make_history(folder / "executorch")
        for defect in [COMPILE] if quick else JOBS:
            bad = defects[IMPORT] if defect == IMPORT else "HEAD"
            env = os.environ | {
                "FARM_CACHE_DIR": str(make_empty_cache(folder / defect / "cache", parts)),
                "FARM_STATE_DIR": str(folder / defect / "state"),
                "FARM_STORE": f"sqlite:///{folder / defect / 'farm.db'}",
            }
            argv = [
                sys.executable,
                "-m",
                "farm.cli.main",
                "bisect",
                "--commits",
                f"{first}..{bad}",
                "--virtual",
                "--json",
            ]
            argv += ["--checkout", str(folder / "executorch"), JOBS[defect]]
            done = subprocess.run(argv, env=env, cwd=_ROOT, stdout=subprocess.PIPE, check=False)
            answer = json.loads(done.stdout)
            [job] = answer["jobs"]
            if not job["found"] or job["first_bad"]["sha"] != defects[defect]:
                raise SystemExit(f"{defect}: {job}")
            compiled = len(answer["compiled_commits"])
            print(
                f"{defect}: {compiled} of {len(answer['commits']) - 1} commits, {answer['seconds']:.0f} s", flush=True
            )
            most = max(most, compiled)
    return {"bisect_builds": most}


if __name__ == "__main__":
    print(json.dumps(figures_bisect(quick="--quick" in sys.argv[1:])))
