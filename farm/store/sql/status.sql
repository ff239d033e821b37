-- Nightly runs of branches since a time, with all their cells, newest first.
-- name: nightly
SELECT id, run_branch, run_name, command, user_name, host FROM run
WHERE run_kind <> 'debug' AND priority = 'nightly' AND NOT run_private AND (:any_branch = 1 OR run_branch = :branch)
  AND (started_ms > :since_ms OR run_nightly IN (
      SELECT run_nightly FROM run WHERE run_nightly <> '' AND started_ms > :since_ms AND priority = 'nightly'
  ))
ORDER BY started_ms DESC, id DESC;

-- name: newest_nightly
SELECT started_ms FROM run
WHERE run_kind <> 'debug' AND priority = 'nightly' AND started_ms > :since_ms AND NOT run_private
  AND (:any_branch = 1 OR run_branch = :branch)
ORDER BY started_ms DESC LIMIT 1;

-- name: newest
SELECT id FROM run
WHERE run_kind <> 'debug' AND run_branch = :branch AND run_began
  AND (NOT run_private OR user_name = :user)
ORDER BY started_ms DESC, id DESC LIMIT 1;

-- name: unfinished
SELECT id, user_name, host, command, started_ms
FROM run
WHERE started_ms > :since_ms AND finished_ms IS NULL AND run_branch = :branch AND (NOT run_private OR user_name = :user)
ORDER BY started_ms DESC;

-- End of each job of a run, and the row of its newest earlier verdict on the branch, found along the index of its runs.
-- name: jobs
SELECT job.name, run_job.skipped, run_job.decisive_verdict AS verdict, attempt.known_issue, attempt.stage, attempt.reason,
       (SELECT earlier.id
        FROM run_job AS earlier JOIN run ON run.id = earlier.run_id
        WHERE earlier.job_id = run_job.job_id AND earlier.run_id < run_job.run_id
          AND earlier.decisive_verdict IN ('passed', 'failed') AND run.run_device_kind = :kind AND run.run_kind <> 'debug'
          AND run.run_branch = :branch AND NOT run.run_private
        ORDER BY earlier.run_id DESC LIMIT 1) AS earlier_id
FROM run_job
JOIN job ON job.id = run_job.job_id
LEFT JOIN attempt ON attempt.id = run_job.decisive_attempt_id
WHERE run_job.run_id = :run
ORDER BY run_job.position;

-- name: earlier
SELECT run_job.id, run_job.run_id, attempt.recorded_ms, attempt.verdict, attempt.known_issue
FROM run_job JOIN attempt ON attempt.id = run_job.decisive_attempt_id
WHERE run_job.id IN :keys;

-- name: jobs_named
SELECT id FROM job WHERE name IN :names ORDER BY id;

-- Jobs of cases on any of the SoCs or in any of the precisions.
-- name: jobs_of_cases
SELECT id FROM job WHERE case_name IN :cases AND (soc IN :socs OR precision IN :precisions) ORDER BY id;

-- Newest row of each job with an attempt, and newest planned row, in runs of a branch, a user's local runs, and `run`:
-- along the index of a job's runs. Ordered by run, not by row: an imported run may be older than earlier rows.
-- name: newest_rows
SELECT job.id,
       (SELECT tried.id FROM run_job AS tried
        WHERE tried.job_id = job.id AND tried.decisive_attempt_id IS NOT NULL
          AND EXISTS (SELECT 1 FROM run WHERE run.id = tried.run_id AND run.run_kind <> 'debug'
                      AND ((run.run_branch = :branch AND (NOT run.run_private OR run.user_name = :user)) OR run.id = :run))
        ORDER BY tried.run_id DESC LIMIT 1) AS tried,
       (SELECT planned.id FROM run_job AS planned
        WHERE planned.job_id = job.id
          AND EXISTS (SELECT 1 FROM run WHERE run.id = planned.run_id AND run.run_kind <> 'debug'
                      AND ((run.run_branch = :branch AND run.run_began
                            AND (NOT run.run_private OR run.user_name = :user)) OR run.id = :run))
        ORDER BY planned.run_id DESC LIMIT 1) AS planned
FROM job WHERE job.id IN :jobs
ORDER BY job.id;

-- The same, only in given runs of any branch.
-- name: newest_rows_of_runs
SELECT job.id,
       (SELECT tried.id FROM run_job AS tried
        WHERE tried.job_id = job.id AND tried.decisive_attempt_id IS NOT NULL AND tried.run_id IN :runs
          AND EXISTS (SELECT 1 FROM run WHERE run.id = tried.run_id AND run.run_kind <> 'debug')
        ORDER BY tried.run_id DESC LIMIT 1) AS tried,
       (SELECT planned.id FROM run_job AS planned
        WHERE planned.job_id = job.id AND planned.run_id IN :runs
          AND EXISTS (SELECT 1 FROM run WHERE run.id = planned.run_id AND run.run_kind <> 'debug')
        ORDER BY planned.run_id DESC LIMIT 1) AS planned
FROM job WHERE job.id IN :jobs
ORDER BY job.id;

-- name: runs_of_rows
SELECT id, run_id FROM run_job WHERE id IN :keys;

-- Deciding attempts of rows in run_job, without long columns.
-- name: results
SELECT run_job.id AS run_job_id, run_job.operators, attempt.id AS attempt_id,
       job.name AS job_id, job.suite, job.case_name AS "case", job.soc, job.backend, job.precision, job.options,
       run.id AS run_id, run.started_ms AS run_started_ms, run.fingerprint_hash AS fingerprint,
       suite_case.version AS case_version, suite_case.module, device.serial, COALESCE(device.kind, '') AS kind
FROM run_job
JOIN attempt ON attempt.id = run_job.decisive_attempt_id
JOIN run ON run.id = run_job.run_id
JOIN job ON job.id = run_job.job_id
JOIN suite_case ON suite_case.id = run_job.case_id
LEFT JOIN device ON device.id = attempt.device_id
WHERE run_job.id IN :ids
ORDER BY attempt.id;

-- name: comparisons
SELECT * FROM comparison WHERE attempt_id IN :attempts ORDER BY attempt_id, position;

-- name: branches
SELECT DISTINCT run_branch FROM run WHERE NOT run_private;

-- Branch of the newest run of any branch or of a user's local run; the default branch has an empty name.
-- name: newest_branch
SELECT run_branch FROM run
WHERE (NOT run_private OR user_name = :user) AND run_began AND run_kind <> 'debug'
ORDER BY started_ms DESC, id DESC LIMIT 1;

-- name: newest_toolchain
SELECT run_toolchain, run_branch, run_private, run_commit, run_dirty, run_source FROM run
WHERE run_branch = :branch AND NOT run_private AND run_began AND run_commit <> '' AND run_kind <> 'debug'
ORDER BY started_ms DESC, id DESC LIMIT 1;

-- name: has_default_branch
SELECT 1 FROM run
WHERE run_branch = '' AND (NOT run_private OR user_name = :user) AND run_began AND run_kind <> 'debug' LIMIT 1;
