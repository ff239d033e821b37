"""`farm setup cache`, and what compiles left that were ended."""

from __future__ import annotations

import json
from pathlib import Path

from farm_home import FarmHome

from farm.base.files import own_folder


def test_what_compiles_left_is_counted_and_removed_and_what_they_use_is_not(tmp_path: Path) -> None:
    home = FarmHome.make(tmp_path / "cache", tmp_path)
    assert home.farm("setup", "cache").stdout == f"0 bundles, 0 B in {home.cache}\n"
    partial = home.cache / "bundles" / "aa" / f"{'a' * 64}.xyz.partial"
    builder = home.cache / "builders" / "killed"
    for folder in (partial, builder / "deep"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * 1500)
    # A killed process leaves its lock file without a holder.
    (home.cache / "builders" / "killed.lock").touch()
    with own_folder(tmp_path / "elsewhere", "killed"), own_folder(home.cache / "virtual", "of a run"):
        shown = home.farm("setup", "cache", "show")
        total = "2 folders that compiles left, 3.0 kB"
        assert f"{total}: 'farm setup cache prune --older 30d --yes' and the next compile remove them" in shown.stdout
        listed = json.loads(home.farm("setup", "cache", "show", "--json").stdout)["leftovers"]
        assert [(one["path"], one["files"], one["nbytes"]) for one in listed] == [
            (str(partial), 1, 1500),
            (str(builder), 1, 1500),
        ]
        dry = home.farm("setup", "cache", "prune", "--older", "30d")
        again = "farm setup cache prune --older 30d --yes"
        assert dry.stdout == f"would remove 0 bundles, 0 B, and {total}\nnothing was removed; to remove it: {again}\n"
        assert partial.is_dir()
        listed = home.json("setup", "cache", "prune", "--older", "30d")
        assert (listed["schema"], listed["removed"], len(listed["leftovers"])) == (1, False, 2)
        done = home.farm("setup", "cache", "prune", "--older", "30d", "--yes")
        assert done.stdout == f"removed 0 bundles, 0 B, and {total}\n"
        assert not partial.exists()
        assert list((home.cache / "builders").iterdir()) == []
        assert (home.cache / "virtual" / "of a run").is_dir()
    with own_folder(home.cache / "builders", "living") as living:
        (living / "file").touch()
        assert "that compiles left" not in home.farm("setup", "cache", "show").stdout
        assert home.farm("setup", "cache", "prune", "--all", "--yes").stdout == "removed 0 bundles, 0 B\n"
        assert (living / "file").exists()
