-- Runs with any of the `count` newest results of a job on a kind of device on its branch.
-- name: with_newest_results
SELECT DISTINCT run_id FROM (
    SELECT run_job.run_id,
           row_number() OVER (
               PARTITION BY run_job.job_id, run.run_device_kind, run.run_branch ORDER BY run_job.run_id DESC
           ) AS age
    FROM run_job JOIN run ON run.id = run_job.run_id
    WHERE run_job.decisive_verdict IN ('passed', 'failed') AND run.run_kind <> 'debug' AND NOT run.run_private
) AS ranked
WHERE age <= :count;
