"""All pages, in the order of the API's description."""

from __future__ import annotations

from farm.serve.page import Page
from farm.serve.pages.alerts import alert_page, alerts_page
from farm.serve.pages.devices import device_page, devices_page
from farm.serve.pages.diff import diff_page
from farm.serve.pages.grid import grid_page
from farm.serve.pages.history import history_page
from farm.serve.pages.hosts import host_page, hosts_page
from farm.serve.pages.jobs import job_page
from farm.serve.pages.nightly_runs import nightly_run_page, nightly_runs_page
from farm.serve.pages.progress import progress_page
from farm.serve.pages.queue import queue_page
from farm.serve.pages.runs import run_page, runs_page
from farm.serve.pages.status import status_page
from farm.serve.pages.suites import suite_page, suites_page
from farm.serve.pages.toolchains import toolchain_page, toolchains_page

PAGES = [Page(make) for make in (
    status_page, grid_page, nightly_runs_page, nightly_run_page, runs_page, run_page, job_page, suites_page,
    suite_page, diff_page, devices_page, device_page, hosts_page, host_page, toolchains_page, toolchain_page,
    alerts_page,
    alert_page, queue_page, history_page, progress_page,
)]  # fmt: skip
