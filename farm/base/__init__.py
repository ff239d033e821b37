"""Errors, farm.toml, SoC profiles and backends; processes, files and text of this machine."""
