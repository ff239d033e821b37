-- name: row
SELECT id FROM job WHERE name = :name;

-- Newest `most` rows of a job in runs of any branch, newest first, along the index of its runs.
-- name: runs
SELECT run.id AS run_id, run.run_nightly AS nightly_run, run.run_name AS name, run.started_ms, run.run_commit AS "commit",
       run.run_branch AS branch, run.run_private AS private,
       COALESCE(run_job.decisive_verdict, '') AS verdict, run_job.skipped, COALESCE(attempt.known_issue, '') AS known_issue,
       COALESCE(attempt.reason, '') AS reason, COALESCE(device.serial, '') AS device, COALESCE(device.kind, '') AS kind,
       run_job.decisive_attempt_id
FROM run_job
JOIN run ON run.id = run_job.run_id
LEFT JOIN attempt ON attempt.id = run_job.decisive_attempt_id
LEFT JOIN device ON device.id = attempt.device_id
WHERE run_job.job_id = :job AND run.run_kind <> 'debug'
ORDER BY run_job.run_id DESC LIMIT :most;

-- name: run_of_nightly
SELECT run.id FROM run_job JOIN run ON run.id = run_job.run_id
WHERE run_job.job_id = :job AND (run.run_nightly = :nightly_run OR run.id = :nightly_run)
ORDER BY run.started_ms DESC, run.id DESC LIMIT 1;

-- Jobs of a run with the facts of their deciding attempts, without logs.
-- name: of_run
SELECT job.name AS job_id, COALESCE(run_job.decisive_verdict, '') AS verdict,
       COALESCE(attempt.known_issue, '') AS known_issue, COALESCE(attempt.stage, '') AS stage,
       COALESCE(attempt.reason, '') AS reason, run_job.skipped, COALESCE(device.serial, '') AS device,
       COALESCE(device.kind, '') AS kind, COALESCE(attempt.seconds, 0.0) AS seconds, run_job.decisive_attempt_id
FROM run_job
JOIN job ON job.id = run_job.job_id
LEFT JOIN attempt ON attempt.id = run_job.decisive_attempt_id
LEFT JOIN device ON device.id = attempt.device_id
WHERE run_job.run_id = :run
ORDER BY run_job.position, run_job.id;

