"""Paths that users name, also other users."""

from __future__ import annotations

from pathlib import Path

from farm.base.errors import ConfigError, UsageError


def relative(path: Path, root: Path) -> str:
    """Return the path below `root`, without following links; empty for a path that leads elsewhere."""
    parts: list[str] = []
    for part in path.parts[len(root.parts) :] if path.parts[: len(root.parts)] == root.parts else ():
        if part == "..":
            if not parts:
                return ""
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def is_path(text: str) -> bool:
    """Return whether a toolchain or an SDK is named by its path: names and versions begin with a letter or a digit."""
    return "/" in text or text.startswith((".", "~"))


def beside(base: Path, text: str) -> Path:
    """Return the absolute path that a user named, relative to `base`. Raises UsageError for an unknown home, `~ada`."""
    try:
        return (base / Path(text).expanduser()).absolute()
    except RuntimeError:
        raise UsageError(f"{text}: there is no such home: write the path without ~") from None


def is_suite_path(name: str) -> bool:
    """Return whether a suite is named by the path of its folder or manifest."""
    return "/" in name or name.endswith(".toml")


def require_inside(manifest: Path, key: str, path: Path, root: Path | None) -> None:
    """Raise ConfigError for a path that leads out of `root`; its file is not looked up. Without a root all may be."""
    if root is not None and not relative(path, root):
        raise ConfigError(manifest, key, f"{str(path).removeprefix(f'{root}/')[:200]!r} is outside of the suite")
