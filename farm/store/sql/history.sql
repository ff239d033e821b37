-- Jobs by name, suite, or suite and case.
-- name: jobs_named
SELECT id, name, suite, soc FROM job
WHERE name = :pattern OR suite = :pattern OR (suite = :suite AND case_name = :case_name)
ORDER BY name;

-- name: jobs
SELECT id, name, suite, soc FROM job ORDER BY name;

-- name: jobs_of_run
SELECT job.id, job.name FROM run_job JOIN job ON job.id = run_job.job_id WHERE run_job.run_id = :run;

-- Newest run with an attempt of each job, the job of the newest run last; runs of `farm debug` count if `debug` is 1.
-- name: newest_runs
SELECT name, run_id FROM (
    SELECT job.name, run.id AS run_id, run.started_ms,
           row_number() OVER (PARTITION BY run_job.job_id ORDER BY run.started_ms DESC, run.id DESC) AS age
    FROM run_job JOIN run ON run.id = run_job.run_id JOIN job ON job.id = run_job.job_id
    WHERE run_job.job_id IN :jobs AND run_job.decisive_attempt_id IS NOT NULL
      AND (:debug = 1 OR run.run_kind <> 'debug')
) AS ranked
WHERE age = 1
ORDER BY started_ms, run_id;

-- name: fingerprints
SELECT hash, facts FROM fingerprint WHERE hash IN :keys;

-- name: metrics
SELECT DISTINCT metric FROM series WHERE job_id IN :jobs;

-- Newest `most` attempts of each job and kind of device on a branch, oldest first; of every run if `any_branch` is 1.
-- As many again of the local runs of a given user that were compared with the branch.
-- An attempt without a device has the kind of its run's devices if all are of one kind.
-- name: attempts
SELECT * FROM (
    SELECT tried.*, row_number() OVER (
        PARTITION BY tried.job_row, tried.device_kind, tried.run_private ORDER BY tried.run_started_ms DESC, tried.attempt_id DESC
    ) AS age
    FROM (
        SELECT attempt.id AS attempt_id, run_job.job_id AS job_row, job.name AS job_id, run.id AS run_id,
               CASE WHEN attempt.started_ms > 0 THEN attempt.started_ms ELSE run.started_ms END AS time_ms,
               run.started_ms AS run_started_ms, run.fingerprint_hash AS fingerprint, suite_case.version AS case_version,
               COALESCE(device.serial, '') AS device,
               COALESCE(device.kind, (
                   SELECT CASE WHEN min(kind) = max(kind) THEN min(kind) END
                   FROM run_device AS had JOIN device AS one ON one.id = had.device_id WHERE had.run_id = run.id
               ), '') AS device_kind,
               attempt.verdict, attempt.known_issue, device.build, run_device.runtime, run.run_commit, run.run_dirty,
               run.run_private
        FROM run_job
        JOIN attempt ON attempt.run_job_id = run_job.id
        JOIN run ON run.id = run_job.run_id
        JOIN job ON job.id = run_job.job_id
        JOIN suite_case ON suite_case.id = run_job.case_id
        LEFT JOIN device ON device.id = attempt.device_id
        LEFT JOIN run_device ON run_device.run_id = run.id AND run_device.device_id = device.id
        WHERE run_job.job_id IN :jobs AND run.run_kind <> 'debug'
          AND (:any_branch = 1 OR (run.run_branch = :branch AND (NOT run.run_private OR run.user_name = :user)))
    ) AS tried
) AS ranked
WHERE age <= :most
ORDER BY run_started_ms, attempt_id;

-- name: medians
SELECT measurement.attempt_id, series.metric, series.unit, series.direction, series.exact, measurement.p50,
       measurement.n, measurement.samples
FROM measurement JOIN series ON series.id = measurement.series_id
WHERE measurement.attempt_id IN :keys;

-- name: counts
SELECT counter.attempt_id, series.metric, series.unit, series.direction, series.exact, counter.value AS p50,
       counter.n, NULL AS samples
FROM counter JOIN series ON series.id = counter.series_id
WHERE counter.attempt_id IN :keys;

-- Newest `most` runs of each job on a branch up to the run `until`, of any branch, with the deciding attempt. Read along
-- the index of a job's runs, whose ids sort by time.
-- name: pasts
SELECT ranked.job_id, ranked.run_id, attempt.id AS attempt_id, attempt.bundle_key, run.started_ms, run.fingerprint_hash,
       suite_case.version, device.serial, device.kind, device.build, run_device.runtime
FROM (
    SELECT run_job.job_id, run_job.run_id, run_job.case_id, run_job.decisive_attempt_id, run_job.decisive_verdict,
           row_number() OVER (PARTITION BY run_job.job_id ORDER BY run_job.run_id DESC) AS age
    FROM run_job JOIN run ON run.id = run_job.run_id
    WHERE run_job.job_id IN :jobs AND run_job.run_id <= :until AND run.run_began
      AND ((run.run_branch = :branch AND NOT run.run_private) OR run.id = :until)
) AS ranked
JOIN attempt ON attempt.id = ranked.decisive_attempt_id
JOIN run ON run.id = ranked.run_id
JOIN device ON device.id = attempt.device_id
LEFT JOIN run_device ON run_device.run_id = ranked.run_id AND run_device.device_id = device.id
JOIN suite_case ON suite_case.id = ranked.case_id
WHERE ranked.age <= :most AND ranked.decisive_verdict IN ('passed', 'failed') AND run.run_kind <> 'debug'
ORDER BY ranked.run_id, attempt.id;

-- name: past_medians
SELECT attempt_id, series_id, p50 FROM measurement WHERE attempt_id IN :keys AND p50 IS NOT NULL;

-- Samples of figures of outputs, whose worst sample decides.
-- name: past_samples
SELECT attempt_id, series_id, samples FROM measurement WHERE attempt_id IN :attempts AND series_id IN :series;

-- name: past_counts
SELECT attempt_id, series_id, value FROM counter WHERE attempt_id IN :keys;

-- name: series
SELECT id, metric, unit, direction, exact FROM series WHERE job_id IN :jobs;

-- Jobs with the run on a branch that has `older` newer runs of the job; empty for fewer runs.
-- name: since
SELECT job.id, job.name,
       COALESCE((SELECT run_job.run_id
                 FROM run_job JOIN run ON run.id = run_job.run_id
                 WHERE run_job.job_id = job.id AND run_job.run_id <= :until
                   AND run.run_device_kind = :kind AND run.run_kind <> 'debug'
                   AND run.run_branch = :branch AND NOT run.run_private AND run.run_began
                 ORDER BY run_job.run_id DESC LIMIT 1 OFFSET :older), '') AS since
FROM job WHERE job.name IN :names;

-- The same, only for jobs with a failed attempt on the branch since that run.
-- name: failed_since
SELECT looked_at.id, looked_at.name, looked_at.since FROM (
    SELECT job.id, job.name,
           COALESCE((SELECT run_job.run_id
                     FROM run_job JOIN run ON run.id = run_job.run_id
                     WHERE run_job.job_id = job.id AND run_job.run_id <= :until
                       AND run.run_device_kind = :kind AND run.run_kind <> 'debug'
                       AND run.run_branch = :branch AND NOT run.run_private AND run.run_began
                     ORDER BY run_job.run_id DESC LIMIT 1 OFFSET :older), '') AS since
    FROM job WHERE job.name IN :names
) AS looked_at
WHERE EXISTS (
    SELECT 1 FROM run_job JOIN attempt ON attempt.run_job_id = run_job.id JOIN run ON run.id = run_job.run_id
    WHERE run_job.job_id = looked_at.id AND run_job.run_id BETWEEN looked_at.since AND :until
      AND attempt.verdict = 'failed' AND run.run_branch = :branch AND NOT run.run_private
);

-- name: planned
SELECT run_job.id, run_job.job_id, run_job.run_id, run_job.judged_by, run_job.program_hash, run.fingerprint_hash
FROM run_job JOIN run ON run.id = run_job.run_id
WHERE run_job.job_id IN :jobs AND run_job.run_id BETWEEN :since AND :until
  AND run.run_device_kind = :kind AND run.run_kind <> 'debug' AND run.run_branch = :branch AND NOT run.run_private;

-- Separate from `planned`, because PostgreSQL would read all attempts for a join.
-- name: tries
SELECT run_job_id, id, verdict, bundle_key
FROM attempt WHERE run_job_id IN :keys AND verdict IN ('passed', 'failed');

-- Measurements of the jobs of a run in their newest runs on a branch up to it, each job along the index of its own runs.
-- name: trend_medians
SELECT measurement.series_id, was.run_id, was.case_id, measurement.p50, series.metric, measurement.samples
FROM (
    SELECT now.job_id,
           COALESCE((SELECT before.run_id
                     FROM run_job AS before JOIN run ON run.id = before.run_id
                     WHERE before.job_id = now.job_id AND before.run_id <= :run
                       AND run.run_device_kind = :kind AND run.run_kind <> 'debug'
                       AND ((run.run_branch = :branch AND NOT run.run_private AND run.run_began) OR run.id = :run)
                     ORDER BY before.run_id DESC LIMIT 1 OFFSET :older), '') AS first
    FROM run_job AS now WHERE now.run_id = :run
) AS starts
JOIN run_job AS was ON was.job_id = starts.job_id
JOIN run ON run.id = was.run_id
JOIN measurement ON measurement.attempt_id = was.decisive_attempt_id
JOIN series ON series.id = measurement.series_id
WHERE was.run_id >= starts.first AND was.run_id <= :run AND was.decisive_verdict IN ('passed', 'failed')
  AND series.metric IN :metrics AND run.run_device_kind = :kind AND run.run_kind <> 'debug'
  AND ((run.run_branch = :branch AND NOT run.run_private) OR run.id = :run)
ORDER BY measurement.series_id, was.run_id;

-- name: trend_counts
SELECT counter.series_id, was.run_id, was.case_id, counter.value, series.metric, NULL AS samples
FROM (
    SELECT now.job_id,
           COALESCE((SELECT before.run_id
                     FROM run_job AS before JOIN run ON run.id = before.run_id
                     WHERE before.job_id = now.job_id AND before.run_id <= :run
                       AND run.run_device_kind = :kind AND run.run_kind <> 'debug'
                       AND ((run.run_branch = :branch AND NOT run.run_private AND run.run_began) OR run.id = :run)
                     ORDER BY before.run_id DESC LIMIT 1 OFFSET :older), '') AS first
    FROM run_job AS now WHERE now.run_id = :run
) AS starts
JOIN run_job AS was ON was.job_id = starts.job_id
JOIN run ON run.id = was.run_id
JOIN counter ON counter.attempt_id = was.decisive_attempt_id
JOIN series ON series.id = counter.series_id
WHERE was.run_id >= starts.first AND was.run_id <= :run AND was.decisive_verdict IN ('passed', 'failed')
  AND series.metric IN :metrics AND run.run_device_kind = :kind AND run.run_kind <> 'debug'
  AND ((run.run_branch = :branch AND NOT run.run_private) OR run.id = :run)
ORDER BY counter.series_id, was.run_id;

-- name: trend_series
SELECT series.id, series.metric, series.unit, series.direction, job.name
FROM run_job
JOIN job ON job.id = run_job.job_id
JOIN series ON series.job_id = job.id
WHERE run_job.run_id = :run AND series.metric IN :metrics;

-- name: began
SELECT id, started_ms, fingerprint_hash FROM run WHERE id IN :keys;
