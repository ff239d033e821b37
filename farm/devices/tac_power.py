"""`python -m farm.devices.tac_power SERIAL`: power cycle of a device by its debug board (TAC, Alpaca, Bughopper).

Power command of `power = "tac:SERIAL"` in farm.toml, where SERIAL is the serial of the debug board. Needs `pytactl`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from farm.base.text import one_line
from farm.builds.runtime.packages import install_hint

# pytactl's name of the sequence that switches off, and on again into a normal boot, on every kind of board.
_CYCLE = "powerOn"


class NoBoardError(Exception):
    """Missing debug board or package, in one line with the next step."""


def main() -> int:
    """Return 0 after a power cycle, or with `--check` for a connected board; 1 with the reason."""
    parser = argparse.ArgumentParser(prog="python -m farm.devices.tac_power")
    parser.add_argument("serial", help="of the debug board, as 'pytactl list' shows it")
    parser.add_argument("--check", action="store_true", help="look for the board, and switch nothing")
    words = parser.parse_args()
    try:
        require_board(words.serial)
        if not words.check:
            cycle(_open(words.serial), words.serial)
    except NoBoardError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def require_board(serial: str) -> None:
    """Raise NoBoardError unless `pytactl` is installed and a debug board of that serial is connected."""
    boards = _package().Board.list_boards()
    known = sorted(one_line(str(one["serial"]), 80) for one in boards)
    if serial not in known:
        there = f"connected are {', '.join(known)}" if known else "no debug board is connected"
        raise NoBoardError(
            f"there is no debug board {serial}, {there}: connect it, see 'pytactl list', and look at the udev rule of "
            "pytactl if it is not listed"
        )


def cycle(board: Any, serial: str) -> None:
    """Switch the power of a board's device off and on again. Raises NoBoardError for a board that cannot."""
    if not callable(getattr(board, _CYCLE, None)):
        raise NoBoardError(f"pytactl has no {_CYCLE} for the debug board {serial}: use a power command of your own")
    try:
        getattr(board, _CYCLE)()
    except Exception as error:  # noqa: BLE001 - of drivers of several packages
        reason = one_line(str(error) or type(error).__name__, 200)
        raise NoBoardError(
            f"the debug board {serial} does not switch: {reason}: see 'pytactl oneshot {_CYCLE}'"
        ) from None


def _open(serial: str) -> Any:
    import pytactl

    try:
        board = _package().Board.create_board(serial, pytactl.default_tac_config_path())
    except Exception as error:  # noqa: BLE001 - as above
        reason = one_line(str(error) or type(error).__name__, 200)
        raise NoBoardError(
            f"the debug board {serial} cannot be opened: {reason}: see the udev rule of pytactl"
        ) from None
    if board is None:
        raise NoBoardError(f"pytactl does not know the kind of the debug board {serial}: see 'pytactl listconfigs'")
    return board


def _package() -> Any:
    """Return pytactl's module of boards. Raises NoBoardError without it."""
    try:
        from pytactl import debugboard
    except ImportError as error:
        raise NoBoardError(f"pytactl is needed for a debug board ({error}): {install_hint('tac')}") from None
    return debugboard


if __name__ == "__main__":
    raise SystemExit(main())
