-- Nightly runs of branches that began before a time, newest first.
-- name: runs
SELECT id AS run_id, run_nightly, COALESCE(run_device_kind, '') AS device_kind, started_ms, finished_ms,
       fingerprint_hash AS fingerprint, run_toolchain, run_branch, run_private, run_commit, run_dirty, run_source
FROM run
WHERE run_kind <> 'debug' AND priority = 'nightly' AND NOT run_private AND run_began
  AND (:any_branch = 1 OR run_branch = :branch) AND started_ms < :before_ms
ORDER BY started_ms DESC, id DESC LIMIT :most;

-- Cells of a nightly run, oldest first; a run outside of `farm nightly` is one by itself.
-- name: runs_of_nightly
SELECT id AS run_id, run_nightly, COALESCE(run_device_kind, '') AS device_kind, started_ms, finished_ms,
       fingerprint_hash AS fingerprint, run_toolchain, run_branch, run_private, run_commit, run_dirty, run_source
FROM run
WHERE priority = 'nightly' AND (run_nightly = :nightly_run OR (id = :nightly_run AND run_nightly = ''))
ORDER BY started_ms, id;
