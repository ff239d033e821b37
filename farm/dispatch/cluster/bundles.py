"""Outcome of a build, a bundle or a failure, as a row of a shared farm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.logs import end_of_log
from farm.store.cluster.records import Build
from farm.store.objects.bundle_archive import upload_bundle

if TYPE_CHECKING:
    from pathlib import Path

    from farm.builds.bundles.bundle import Bundle
    from farm.builds.compile.protocol import BuildReply
    from farm.store.objects.objects import Objects

_LOG_BYTES = 16 * 1024


def sent_build(objects: Objects, bundle: Bundle, reply: BuildReply) -> Build:
    """Upload the archive of a bundle to the artifact store, and return its row. Raises ArtifactsError."""
    archive, nbytes = upload_bundle(objects, bundle)
    return Build(bundle.manifest.key, "built", archive, nbytes, reply)


def failed_build(reply: BuildReply, log: Path) -> Build:
    """Return the row of a failed build, with the end of the compiler's log."""
    return Build(reply.key, "failed", reply=reply, log=end_of_log(log, _LOG_BYTES).replace("\0", ""))
