-- name: live
SELECT id FROM run
WHERE started_ms > :since_ms AND (finished_ms IS NULL OR finished_ms > :ended_ms)
ORDER BY started_ms DESC LIMIT :most;

-- name: planned
SELECT run.id AS run_id, run.finished_ms, run.exit_code, count(run_job.id) AS planned,
       sum(CASE WHEN run_job.skipped IS NOT NULL THEN 1 ELSE 0 END) AS skipped_jobs
FROM run LEFT JOIN run_job ON run_job.run_id = run.id
WHERE run.id IN :runs
GROUP BY run.id, run.finished_ms, run.exit_code;

-- Number of jobs with an attempt by their result; `known` are failures with a known issue.
-- name: outcomes
SELECT run_job.run_id,
       CASE WHEN run_job.decisive_verdict = 'failed' AND attempt.known_issue <> '' THEN 'known' ELSE run_job.decisive_verdict END AS outcome,
       count(*) AS jobs, max(attempt.recorded_ms) AS last_ms
FROM run_job JOIN attempt ON attempt.id = run_job.decisive_attempt_id
WHERE run_job.run_id IN :runs
GROUP BY run_job.run_id, outcome;

-- name: targets
SELECT DISTINCT run_job.run_id, job.soc, job.suite
FROM run_job JOIN job ON job.id = run_job.job_id
WHERE run_job.run_id IN :runs;

-- name: file_counts
SELECT run_job.run_id, count(*) AS files
FROM artifact
JOIN attempt ON attempt.id = artifact.attempt_id
JOIN run_job ON run_job.id = attempt.run_job_id
WHERE run_job.run_id IN :runs
GROUP BY run_job.run_id;

-- name: cases
SELECT DISTINCT suite, case_name FROM job ORDER BY suite, case_name LIMIT :most;

-- name: on_device
SELECT attempt.id, run_job.run_id, job.name AS job_id, attempt.verdict, attempt.known_issue, attempt.stage,
       attempt.cause, attempt.reason, attempt.recorded_ms, attempt.seconds, run.fingerprint_hash AS fingerprint,
       suite_case.version AS case_version, run.run_private
FROM attempt
JOIN run_job ON run_job.id = attempt.run_job_id
JOIN run ON run.id = run_job.run_id
JOIN job ON job.id = run_job.job_id
JOIN suite_case ON suite_case.id = run_job.case_id
WHERE attempt.device_id IN (SELECT id FROM device WHERE serial = :serial AND kind = :kind)
ORDER BY attempt.id DESC LIMIT :most;

-- name: latencies
SELECT measurement.attempt_id, measurement.p50
FROM measurement JOIN series ON series.id = measurement.series_id
WHERE measurement.attempt_id IN :keys AND series.metric = 'latency' AND measurement.p50 IS NOT NULL;

-- name: file_kind
SELECT kind FROM artifact WHERE sha256 = :sha256 LIMIT 1;

-- Devices of runs by serial and kind, also devices that no one registered, such as virtual devices.
-- name: met_devices
SELECT device.serial, device.soc, device.kind, max(run.started_ms) AS last_ms, count(*) AS runs
FROM run_device JOIN device ON device.id = run_device.device_id JOIN run ON run.id = run_device.run_id
GROUP BY device.serial, device.soc, device.kind
ORDER BY last_ms DESC LIMIT :most;

-- Toolchains of runs, the newest first.
-- name: toolchains
SELECT run_toolchain AS name, run_branch AS branch, run_commit AS hash, count(*) AS runs, max(started_ms) AS last_ms,
       min(started_ms) AS first_ms, max(id) AS newest,
       sum(CASE WHEN exit_code = 0 THEN 1 ELSE 0 END) AS passed,
       sum(CASE WHEN exit_code = 1 THEN 1 ELSE 0 END) AS failed
FROM run WHERE run_kind <> 'debug' AND run_began AND (:hash = '' OR run_commit = :hash)
GROUP BY run_toolchain, run_branch, run_commit
ORDER BY last_ms DESC LIMIT :most;

-- name: hosts
SELECT host, count(*) AS runs, max(started_ms) AS last_ms FROM run GROUP BY host ORDER BY last_ms DESC LIMIT :most;
