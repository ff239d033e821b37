-- Newest attempt of each job with a profile, as rows or files.
-- name: newest
SELECT * FROM (
    SELECT attempt.id AS attempt_id, job.name AS job_id, job.backend, run.id AS run_id,
           CASE WHEN attempt.started_ms > 0 THEN attempt.started_ms ELSE run.started_ms END AS time_ms,
           fingerprint.facts, suite_case.version AS case_version, COALESCE(device.serial, '') AS device,
           COALESCE(device.kind, '') AS device_kind, attempt.verdict,
           row_number() OVER (PARTITION BY run_job.job_id ORDER BY run.started_ms DESC, attempt.id DESC) AS age
    FROM run_job
    JOIN attempt ON attempt.run_job_id = run_job.id
    JOIN run ON run.id = run_job.run_id
    JOIN fingerprint ON fingerprint.hash = run.fingerprint_hash
    JOIN job ON job.id = run_job.job_id
    JOIN suite_case ON suite_case.id = run_job.case_id
    LEFT JOIN device ON device.id = attempt.device_id
    WHERE run_job.job_id IN :jobs AND (:run = '' OR run_job.run_id = :run)
      AND (EXISTS (SELECT 1 FROM op_profile WHERE op_profile.attempt_id = attempt.id AND op_profile.position = 0)
           OR EXISTS (SELECT 1 FROM artifact
                      WHERE artifact.attempt_id = attempt.id
                        AND (artifact.kind = 'etdump' OR artifact.kind LIKE 'optrace:%' OR artifact.kind LIKE 'qhas:%')))
) AS ranked
WHERE age = 1
ORDER BY job_id;

-- name: operators
SELECT attempt_id, node, delegate, unit, n, p50, least, greatest, share, module, source
FROM op_profile WHERE attempt_id IN :attempts ORDER BY attempt_id, position;

-- name: artifacts
SELECT attempt_id, sha256, size, kind FROM artifact WHERE attempt_id IN :attempts ORDER BY id;
