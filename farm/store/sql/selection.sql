-- Recent results of jobs with a verdict about the code and their durations, newest first: in runs of a branch and in a
-- user's local runs compared with it, or in every run if `any_branch` is 1.
-- name: expected
SELECT recent.*,
       (SELECT sum(attempt.seconds) FROM attempt
        WHERE attempt.run_job_id = recent.id AND attempt.verdict IN ('passed', 'failed')) AS seconds
FROM (
    SELECT run_job.id, job.name, run_job.run_id, run_job.build_seconds, run_job.cached,
           COALESCE(run_job.bundle_key, '') AS bundle_key, COALESCE(run_job.judged_by, '') AS judged_by,
           run_job.decisive_verdict AS verdict, attempt.known_issue, attempt.recorded_ms AS time_ms,
           row_number() OVER (
               PARTITION BY run_job.job_id ORDER BY attempt.recorded_ms DESC, attempt.id DESC
           ) AS age
    FROM run_job
    JOIN job ON job.id = run_job.job_id
    JOIN run ON run.id = run_job.run_id
    JOIN attempt ON attempt.id = run_job.decisive_attempt_id
    WHERE job.name IN :keys AND run_job.decisive_verdict IN ('passed', 'failed')
      AND run.run_device_kind = :kind AND run.run_kind <> 'debug'
      AND (:any_branch = 1 OR (run.run_branch = :branch AND (NOT run.run_private OR run.user_name = :user)))
) AS recent
WHERE age <= :most_runs
ORDER BY age;

-- Jobs that did not pass in the newest run of a user with an attempt of them on a branch; local runs compared with the
-- branch count if `private` is 1.
-- name: failed_last
SELECT name FROM (
    SELECT job.name, run_job.decisive_verdict AS verdict, attempt.known_issue,
           row_number() OVER (PARTITION BY run_job.job_id ORDER BY run.started_ms DESC, run_job.id DESC) AS age
    FROM run_job
    JOIN job ON job.id = run_job.job_id
    JOIN run ON run.id = run_job.run_id
    JOIN attempt ON attempt.id = run_job.decisive_attempt_id
    WHERE job.name IN :keys AND run.user_name = :user AND run.run_device_kind = :kind AND run.run_kind <> 'debug'
      AND run.run_branch = :branch AND (:private = 1 OR NOT run.run_private)
) AS newest
WHERE age = 1 AND (verdict = 'infra' OR (verdict = 'failed' AND known_issue = ''));
