-- Run that is `back` runs older than the newest of a branch, or of all runs if `any_branch` is 1. User, priority and name
-- restrict the runs if given; runs that never began count if `unbegun` is 1.
-- name: back
SELECT id FROM run
WHERE (:any_branch = 1 OR (run_branch = :branch AND NOT run_private)) AND (run_began OR :unbegun = 1)
  AND (:user = '' OR user_name = :user) AND (:priority = '' OR priority = :priority)
  AND (:name = '' OR run_name = :name)
ORDER BY started_ms DESC, id DESC LIMIT 1 OFFSET :back;

-- name: newest
SELECT id FROM run ORDER BY started_ms DESC, id DESC LIMIT :most;

-- name: names
SELECT run_name FROM run WHERE run_name <> '' GROUP BY run_name ORDER BY max(started_ms) DESC LIMIT :most;

-- Ids that are LIKE a pattern, with / as the escape character.
-- name: like
SELECT id FROM run WHERE id LIKE :pattern ESCAPE '/' ORDER BY started_ms DESC, id DESC LIMIT :most;

-- name: count
SELECT count(*) FROM run
WHERE (:any_branch = 1 OR (run_branch = :branch AND NOT run_private)) AND (run_began OR :unbegun = 1)
  AND (:user = '' OR user_name = :user) AND (:priority = '' OR priority = :priority)
  AND (:name = '' OR run_name = :name);

-- name: run
SELECT run.*, fingerprint.facts
FROM run JOIN fingerprint ON fingerprint.hash = run.fingerprint_hash
WHERE run.id = :run;

-- name: devices
SELECT device.*, run_device.runtime
FROM run_device JOIN device ON device.id = run_device.device_id
WHERE run_device.run_id = :run;

-- Jobs of a run, or of one job in it if `job` is no 0; so the following statements.
-- name: jobs
SELECT run_job.*, job.name, job.suite, job.soc, job.backend, job.precision, job.options,
       suite_case.module, suite_case.version
FROM run_job
JOIN job ON job.id = run_job.job_id
JOIN suite_case ON suite_case.id = run_job.case_id
WHERE run_job.run_id = :run AND (:job = 0 OR run_job.job_id = :job)
ORDER BY run_job.position, run_job.id;

-- name: attempts
SELECT attempt.*, job.name AS job_id, device.serial
FROM attempt
JOIN run_job ON run_job.id = attempt.run_job_id
JOIN job ON job.id = run_job.job_id
LEFT JOIN device ON device.id = attempt.device_id
WHERE run_job.run_id = :run AND (:job = 0 OR run_job.job_id = :job)
ORDER BY attempt.id;

-- name: comparisons
SELECT comparison.*
FROM comparison
WHERE comparison.attempt_id IN (
    SELECT attempt.id FROM attempt JOIN run_job ON run_job.id = attempt.run_job_id WHERE run_job.run_id = :run AND (:job = 0 OR run_job.job_id = :job)
)
ORDER BY comparison.attempt_id, comparison.position;

-- name: measurements
SELECT measurement.attempt_id, measurement.position, measurement.samples,
       series.metric, series.unit, series.direction, series.exact
FROM measurement JOIN series ON series.id = measurement.series_id
WHERE measurement.attempt_id IN (
    SELECT attempt.id FROM attempt JOIN run_job ON run_job.id = attempt.run_job_id WHERE run_job.run_id = :run AND (:job = 0 OR run_job.job_id = :job)
);

-- name: counters
SELECT counter.attempt_id, counter.position, counter.samples,
       series.metric, series.unit, series.direction, series.exact
FROM counter JOIN series ON series.id = counter.series_id
WHERE counter.attempt_id IN (
    SELECT attempt.id FROM attempt JOIN run_job ON run_job.id = attempt.run_job_id WHERE run_job.run_id = :run AND (:job = 0 OR run_job.job_id = :job)
);

-- name: operators
SELECT attempt_id, node, delegate, unit, n, p50, least, greatest, share, module, source
FROM op_profile
WHERE attempt_id IN (
    SELECT attempt.id FROM attempt JOIN run_job ON run_job.id = attempt.run_job_id WHERE run_job.run_id = :run AND (:job = 0 OR run_job.job_id = :job)
)
ORDER BY attempt_id, position;

-- name: layers
SELECT layer.*
FROM layer
WHERE layer.attempt_id IN (
    SELECT attempt.id FROM attempt JOIN run_job ON run_job.id = attempt.run_job_id WHERE run_job.run_id = :run AND (:job = 0 OR run_job.job_id = :job)
)
ORDER BY layer.attempt_id, layer.position;

-- name: artifacts
SELECT job.name AS job_id, artifact.attempt_id, artifact.kind, artifact.size, artifact.sha256,
       (SELECT count(*) FROM attempt earlier
        WHERE earlier.run_job_id = attempt.run_job_id AND earlier.id <= attempt.id) AS attempt
FROM artifact
JOIN attempt ON attempt.id = artifact.attempt_id
JOIN run_job ON run_job.id = attempt.run_job_id
JOIN job ON job.id = run_job.job_id
WHERE run_job.run_id = :run AND (:job = 0 OR run_job.job_id = :job)
ORDER BY artifact.id;

-- Planned jobs of a run on one SoC and backend.
-- name: planned
SELECT job.name, suite_case.module, job.case_name, job.precision
FROM run_job
JOIN job ON job.id = run_job.job_id
JOIN suite_case ON suite_case.id = run_job.case_id
WHERE run_job.run_id = :run AND job.soc = :soc AND job.backend = :backend
ORDER BY run_job.position, run_job.id;

-- Verdicts of a run about the code.
-- name: verdicts
SELECT job.name, run_job.run_id, COALESCE(run_job.bundle_key, '') AS bundle_key,
       COALESCE(run_job.judged_by, '') AS judged_by, run_job.decisive_verdict AS verdict, attempt.known_issue,
       attempt.recorded_ms AS time_ms
FROM run_job
JOIN job ON job.id = run_job.job_id
JOIN attempt ON attempt.id = run_job.decisive_attempt_id
WHERE run_job.run_id = :run AND run_job.decisive_verdict IN ('passed', 'failed');
