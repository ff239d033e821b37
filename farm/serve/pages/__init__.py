"""All pages: one module per object, one line per page."""

from __future__ import annotations

from farm.serve.page import Page
from farm.serve.pages.alerts import alert_page, alerts_page
from farm.serve.pages.devices import device_page, devices_page
from farm.serve.pages.diff import diff_page
from farm.serve.pages.grid import grid_page
from farm.serve.pages.history import history_page
from farm.serve.pages.hosts import host_page, hosts_page
from farm.serve.pages.jobs import job_page
from farm.serve.pages.nights import night_page, nights_page
from farm.serve.pages.progress import progress_page
from farm.serve.pages.queue import queue_page
from farm.serve.pages.run import run_page
from farm.serve.pages.runs import files_page, runs_page
from farm.serve.pages.status import status_page
from farm.serve.pages.suites import suite_page, suites_page
from farm.serve.pages.toolchains import toolchain_page, toolchains_page

PAGES = [
    Page("/", status_page),
    Page("/grid", grid_page),
    Page("/nights", nights_page),
    Page("/nights/{night:str}", night_page),
    Page("/runs", runs_page),
    Page("/runs/{run:str}", run_page),
    Page("/runs/{run:str}/files", files_page),
    Page("/jobs/{job:path}", job_page),
    Page("/suites", suites_page),
    Page("/suites/{suite:str}", suite_page),
    Page("/diff", diff_page),
    Page("/devices", devices_page),
    Page("/devices/{device:path}", device_page),
    Page("/hosts", hosts_page),
    Page("/hosts/{host:str}", host_page),
    Page("/toolchains", toolchains_page),
    Page("/toolchains/{commit:str}", toolchain_page),
    Page("/alerts", alerts_page),
    Page("/alerts/{alert:int}", alert_page),
    Page("/queue", queue_page),
    Page("/history", history_page),
    Page("/progress", progress_page),
]
