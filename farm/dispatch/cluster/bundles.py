"""A bundle that was made, or could not be, as the rows of a shared farm have it."""

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
    """Return the bundle as others find it, its archive in the artifacts' store. Raises ArtifactsError."""
    archive, nbytes = upload_bundle(objects, bundle)
    return Build(bundle.manifest.key, "built", archive, nbytes, reply)


def failed_build(reply: BuildReply, log: Path) -> Build:
    """Return a bundle that the compiler could not make, with the end of what it printed."""
    return Build(reply.key, "failed", reply=reply, log=end_of_log(log, _LOG_BYTES).replace("\0", ""))
