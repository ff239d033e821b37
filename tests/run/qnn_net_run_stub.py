#!/usr/bin/env python3
"""Stands in for the SDK's qnn-net-run: checks its arguments, and writes a log with their names."""

import json
import sys
from pathlib import Path

words = sys.argv[1:]
context = Path(words[words.index("--retrieve_context") + 1])
extensions = json.loads(Path("extensions.json").read_text())["backend_extensions"]
assert Path(extensions["shared_library_path"]).is_file()
soc = json.loads(Path(extensions["config_file_path"]).read_text())["devices"][0]["soc_id"]
names = [name for line in Path("input_list.txt").read_text().splitlines() for name in line.split()]
assert all(Path(name).stat().st_size for name in names)
Path("output").mkdir()
log = f"{context.name} of {context.stat().st_size} bytes, SoC {soc}, {len(names)} inputs, {words[-1]}"
Path("output/qnn-profiling-data_0.log").write_text(log)
