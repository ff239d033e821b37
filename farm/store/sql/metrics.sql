-- name: attempts
SELECT job.soc, device.kind, device.serial, device.soc AS device_soc, attempt.verdict, COALESCE(attempt.cause, '') AS cause,
       run_job.decisive_attempt_id = attempt.id AS decides, count(*) AS attempts, coalesce(sum(attempt.seconds), 0) AS seconds
FROM run
JOIN run_job ON run_job.run_id = run.id
JOIN job ON job.id = run_job.job_id
JOIN attempt ON attempt.run_job_id = run_job.id
LEFT JOIN device ON device.id = attempt.device_id
WHERE run.started_ms >= :since_ms
GROUP BY job.soc, device.kind, device.serial, device.soc, attempt.verdict, attempt.cause,
         run_job.decisive_attempt_id = attempt.id;

-- name: wear
SELECT device.serial, device.kind, device.soc, sum(counted.attempts) AS attempts
FROM (SELECT device_id, count(*) AS attempts FROM attempt WHERE device_id IS NOT NULL GROUP BY device_id) AS counted
JOIN device ON device.id = counted.device_id
GROUP BY device.serial, device.kind, device.soc;
