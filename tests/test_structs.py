"""Types that threads decode are ready before there are any."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from farm.base.toml_tables import prepare_decoders

# Without `prepare_decoders` one process in some dozens ends with SIGSEGV.
_CODE = """
import threading
import msgspec
from farm.dispatch.cluster.terms import WorkTerms
from farm.dispatch.request.request import RunPlan
from farm.store.cluster.records import HeldShard
from farm.base.toml_tables import prepare_decoders

assert prepare_decoders() > 50
together = threading.Barrier(8)

def decode():
    together.wait()
    for kind in (RunPlan, WorkTerms, HeldShard):
        try:
            msgspec.json.decode(b"{}", type=kind, dec_hook=lambda _kind, value: value)
        except msgspec.ValidationError:
            pass

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_decode_the_same_types_at_once() -> None:
    assert [subprocess.run([sys.executable, "-c", _CODE], check=False).returncode for _ in range(3)] == [0, 0, 0]


def test_types_are_prepared_once_also_those_that_no_process_can_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each device process and each worker of a run asks for this.
    kind = msgspec.defstruct("Unreadable", [("at", "pathlib.NoSuchType")])
    first = prepare_decoders()
    tried: list[type] = []
    monkeypatch.setattr(msgspec.json, "Decoder", tried.append)
    assert prepare_decoders() == first
    assert tried == [], kind
