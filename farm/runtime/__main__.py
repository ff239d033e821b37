"""`python -m farm.runtime`: build what is native now, so that the first run does not have to."""

from __future__ import annotations

import sys

from farm.config.settings import load_config
from farm.errors import FarmError
from farm.runtime.native.build import build_native
from farm.runtime.simulator import host_sdk


def main() -> int:
    """Build and say where; an error is one line."""
    try:
        config = load_config()
        native = build_native(config.cache_dir)
        host_sdk(config.cache_dir, sdk_root=config.sdk_root)
    except FarmError as error:
        print(f"farm: {error}", file=sys.stderr)  # noqa: T201 - this is the output
        return error.exit_code
    print(f"farm: the native runner is {native.runner}", file=sys.stderr)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
