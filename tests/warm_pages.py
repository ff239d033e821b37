"""Compiles the templates of all pages where it is imported: in the process whose forks are commands."""

from __future__ import annotations

from farm.report.html.templates import environment

_environment = environment()
for _name in _environment.list_templates(filter_func=lambda name: name.endswith(".html.j2")):
    _environment.get_template(_name)
