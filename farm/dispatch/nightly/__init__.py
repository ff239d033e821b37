"""nightly.toml -> cells, one run each -> pages, exports, notifications, an exit code."""
