from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from board_image import BoardImage, board_image
from booted_board import Board
from farm_home import FarmHome

from farm.base.processes import Supervisor


@pytest.fixture(scope="session")
def image(farm_cache: Path) -> BoardImage:
    return board_image(farm_cache)


@pytest.fixture(scope="module")
def started(image: BoardImage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    with Supervisor() as supervisor:
        yield Board(supervisor, image, tmp_path_factory.mktemp("board")).start()


@pytest.fixture
def board(started: Board) -> Iterator[Board]:
    """Board of all tests; a board that a test left out of order is switched off and on."""
    yield started
    if not started.is_well:
        started.stop()
        started.start()


@pytest.fixture
def board_home(board: Board, home: FarmHome) -> FarmHome:
    """`farm` where the board is the one device that farm.toml names."""
    (home.cwd / "farm.toml").write_text(board.configuration)
    return home
