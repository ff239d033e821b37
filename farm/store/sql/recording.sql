-- Planned job of a run, and the run's device with a serial. A subquery instead of a join finds the job: PostgreSQL would
-- scan all jobs of a run that its statistics do not contain yet.
-- name: planned
SELECT run_job.id, run_job.job_id, (
    SELECT device.id
    FROM device JOIN run_device ON run_device.device_id = device.id
    WHERE run_device.run_id = :run AND device.serial = :serial
    ORDER BY device.id DESC LIMIT 1
) AS device_id
FROM run_job
WHERE run_job.run_id = :run AND run_job.job_id = (SELECT job.id FROM job WHERE job.name = :job);

-- The same with the series of the job, one per row; NULL for a job without series.
-- name: planned_with_series
SELECT run_job.id, run_job.job_id, (
    SELECT device.id
    FROM device JOIN run_device ON run_device.device_id = device.id
    WHERE run_device.run_id = :run AND device.serial = :serial
    ORDER BY device.id DESC LIMIT 1
) AS device_id, series.id AS series_id, series.metric, series.unit, series.direction, series.exact
FROM run_job LEFT JOIN series ON series.job_id = run_job.job_id
WHERE run_job.run_id = :run AND run_job.job_id = (SELECT job.id FROM job WHERE job.name = :job);

-- name: series
SELECT id, metric, unit, direction, exact FROM series WHERE job_id = :job;

-- name: tried
SELECT 1 FROM run_job WHERE run_id = :run AND decisive_attempt_id IS NOT NULL LIMIT 1;
