"""All pages: one module per object, one line per page."""

from __future__ import annotations

from farm.serve.page import Page
from farm.serve.pages.devices import device_page, devices_page
from farm.serve.pages.diff import diff_page
from farm.serve.pages.history import history_page
from farm.serve.pages.progress import progress_page
from farm.serve.pages.runs import files_page, runs_page
from farm.serve.pages.status import status_page

PAGES = [
    Page("/", status_page),
    Page("/runs", runs_page),
    Page("/runs/{run:str}/files", files_page),
    Page("/diff", diff_page),
    Page("/devices", devices_page),
    Page("/devices/{device:path}", device_page),
    Page("/history", history_page),
    Page("/progress", progress_page),
]
