#!/usr/bin/env python3
"""Stub of the SDK's qnn-profile-viewer: it writes two files from its arguments."""

import json
import sys
from pathlib import Path

given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
assert json.loads(Path(given["--config"]).read_text())["features"]["qhas_json"] is True
assert Path(given["--schematic"]).stat().st_size > 0
assert Path(given["--reader"]).is_file()
output = Path(given["--output"])
output.write_text(json.dumps({"traceEvents": [], "log": Path(given["--input_log"]).read_text()}))
output.with_name(f"{output.stem}_qnn_htp_analysis_summary.json").write_text('{"data": {}}')
