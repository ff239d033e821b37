-- Planned jobs of a run with the series of each, one per row; NULL for a job without series. A subquery beside the join
-- finds the jobs: PostgreSQL would scan all jobs of a run that its statistics do not contain yet.
-- name: planned
SELECT job.name AS job_name, run_job.id AS run_job_id, run_job.job_id, series.id AS series_id, series.metric,
       series.unit, series.direction, series.exact
FROM run_job JOIN job ON job.id = run_job.job_id LEFT JOIN series ON series.job_id = run_job.job_id
WHERE run_job.run_id = :run AND run_job.job_id IN (SELECT id FROM job WHERE name IN :jobs);

-- name: devices
SELECT device.serial, max(device.id) AS id
FROM device JOIN run_device ON run_device.device_id = device.id
WHERE run_device.run_id = :run AND device.serial IN :serials
GROUP BY device.serial;

-- name: series
SELECT id, metric, unit, direction, exact FROM series WHERE job_id = :job;

-- name: tried
SELECT 1 FROM run_job WHERE run_id = :run AND decisive_attempt_id IS NOT NULL LIMIT 1;
