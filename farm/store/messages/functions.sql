-- Functions and triggers of farm over Procrastinate's tables, in the schema {schema} of both.
--
-- Every function runs as the owner of the tables, so that no login needs the right to write them. `search_path` limits
-- names of tables, functions and operators to that schema and PostgreSQL's own.

-- Functions of earlier versions.
DROP FUNCTION IF EXISTS farm_tidy_messages(double precision);
DROP FUNCTION IF EXISTS farm_settle_builds(text[]);
DROP TRIGGER IF EXISTS farm_shards_left ON shard;
DROP FUNCTION IF EXISTS farm_shards_left();

-- Defer the job that finishes a run, for each of `runs` that is over: no shard waits or runs, or the run was cancelled,
-- has too many failures or has used up its time while shards wait. A job that waits already is not deferred twice.
CREATE OR REPLACE FUNCTION farm_finish_runs(runs text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    one text;
BEGIN
    -- The lock lets the second of two transactions that end shards of one run see the rows of the first.
    PERFORM 1 FROM run_order WHERE run_id = ANY(runs) ORDER BY run_id FOR NO KEY UPDATE;
    FOR one IN
        SELECT run_id FROM run_order CROSS JOIN LATERAL (
            SELECT count(*) AS unended, count(*) FILTER (WHERE shard.state = 'waiting') AS waiting
            FROM shard WHERE shard.run_id = run_order.run_id AND shard.state IN ('waiting', 'held')
        ) AS counts
        WHERE run_id = ANY(runs) AND (unended = 0 OR waiting > 0 AND (state = 'cancelled' OR failures >= most_failures
            OR until_ms <= extract(epoch FROM clock_timestamp()) * 1000))
    LOOP
        BEGIN
            PERFORM procrastinate_defer_jobs_v1(ARRAY[
                ROW('farm', 'farm.finish', 50, NULL, 'finish:' || one, jsonb_build_object('run', one), NULL)
            ]::procrastinate_job_to_defer_v1[]);
        EXCEPTION WHEN unique_violation THEN
            NULL;
        END;
    END LOOP;
END;
$$;

-- Check runs whose shards were released (ended or put back), and cancelled runs, in the transaction of the rows.
CREATE OR REPLACE FUNCTION farm_shards_released() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
BEGIN
    PERFORM farm_finish_runs(ARRAY(
        SELECT changed.run_id FROM before JOIN changed USING (id) WHERE before.state = 'held' AND changed.state <> 'held'));
    RETURN NULL;
END;
$$;
CREATE OR REPLACE FUNCTION farm_run_cancelled() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
BEGIN
    PERFORM farm_finish_runs(ARRAY[NEW.run_id]);
    RETURN NULL;
END;
$$;
DROP TRIGGER IF EXISTS farm_shards_released ON shard;
CREATE TRIGGER farm_shards_released AFTER UPDATE ON shard REFERENCING OLD TABLE AS before NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION farm_shards_released();
DROP TRIGGER IF EXISTS farm_run_cancelled ON run_order;
CREATE TRIGGER farm_run_cancelled AFTER UPDATE OF state ON run_order FOR EACH ROW
    WHEN (NEW.state = 'cancelled' AND OLD.state <> 'cancelled') EXECUTE FUNCTION farm_run_cancelled();

-- Defer a build job for each bundle of `keys` that waits without a job; return the number of jobs.
-- Urgent builds go first. Within a class users alternate: the first job of a user gets the turn of the first waiting
-- job, and each further job of that user one turn later.
CREATE OR REPLACE FUNCTION farm_defer_builds(keys text[]) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    urgency CONSTANT integer := 1000000000;
    jobs procrastinate_job_to_defer_v1[];
BEGIN
    IF cardinality(keys) = 0 THEN
        RETURN 0;
    END IF;
    WITH lacking AS (
        SELECT key, 'build:' || md5(toolchain) AS queue, user_name, least(greatest(build.priority, 0), 1) AS class,
               row_number() OVER (PARTITION BY toolchain, user_name, build.priority ORDER BY position, key) AS turn
        FROM build WHERE key = ANY(keys) AND state = 'waiting' AND NOT EXISTS (
            SELECT 1 FROM procrastinate_jobs
            WHERE queueing_lock = 'build:' || build.key AND status IN ('todo', 'doing'))
    ), queued AS (
        SELECT queue_name AS queue, CASE WHEN priority > 0 THEN 1 ELSE 0 END AS class, args ->> 'user' AS user_name,
               CASE WHEN priority > 0 THEN urgency - priority ELSE -priority END AS turn
        FROM procrastinate_jobs WHERE status = 'todo' AND task_name = 'farm.build'
    ), served AS (
        SELECT queue, class, min(turn) - 1 AS turn FROM queued GROUP BY queue, class
    ), last AS (
        SELECT queue, class, user_name, max(turn) AS turn FROM queued GROUP BY queue, class, user_name
    )
    SELECT array_agg(
        ROW(queue, 'farm.build', class * urgency - (greatest(served.turn, last.turn, 0) + lacking.turn), NULL,
            'build:' || key, jsonb_build_object('key', key, 'user', user_name), NULL)::procrastinate_job_to_defer_v1
        ORDER BY lacking.turn, user_name) INTO jobs
    FROM lacking LEFT JOIN served USING (queue, class) LEFT JOIN last USING (queue, class, user_name);
    RETURN coalesce(cardinality(procrastinate_defer_jobs_v1(jobs)), 0);
END;
$$;

-- Apply ended builds (`ended` has their keys) to the shards and runs that wait for them: remove the wants of built
-- bundles, record their facts with every run that waits, mark the wants of failed builds, and count down
-- `shard.lacking`. Agents are notified of shards that have all bundles now.
CREATE OR REPLACE FUNCTION farm_apply_builds(ended text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    affected bigint[];
    socs text[];
BEGIN
    WITH made AS (
        DELETE FROM build_wanted AS wanted USING build
        WHERE wanted.key = ANY(ended) AND failure IS NULL AND build.key = wanted.key AND state = 'built'
        RETURNING wanted.shard, job, run_id, build.key, manifest
    ), recorded AS (
        UPDATE run_job SET build_seconds = CAST(manifest ->> 'seconds' AS float8),
            cached = CAST(manifest ->> 'seconds' AS float8) = 0, bundle_key = made.key,
            program_hash = nullif(left(manifest ->> 'program', 64), ''), fallback_ops = manifest -> 'fallback_ops',
            operators = manifest -> 'operators'
        FROM made JOIN job ON job.name = made.job
        WHERE run_job.run_id = made.run_id AND run_job.job_id = job.id AND manifest IS NOT NULL
    ), refused AS (
        UPDATE build_wanted AS wanted SET failure = json_build_object(
            'key', build.key, 'state', state, 'reply', CAST(reply AS json), 'log', build.log)
        FROM build
        WHERE wanted.key = ANY(ended) AND failure IS NULL AND build.key = wanted.key AND state = 'failed'
        RETURNING wanted.shard
    )
    SELECT array_agg(shard) INTO affected FROM (SELECT shard FROM made UNION ALL SELECT shard FROM refused) AS waiting;
    IF affected IS NULL THEN
        RETURN;
    END IF;
    -- Lock shards by ascending id, as everywhere, so that two transactions never wait for each other.
    PERFORM 1 FROM shard WHERE id = ANY(affected) ORDER BY id FOR UPDATE;
    WITH changed AS (
        UPDATE shard SET lacking = lacking - gone.n
        FROM (SELECT id, count(*) AS n FROM unnest(affected) AS id GROUP BY id) AS gone
        WHERE shard.id = gone.id RETURNING soc, lacking, state
    )
    SELECT array_agg(DISTINCT soc) INTO socs FROM changed WHERE lacking = 0 AND state = 'waiting';
    PERFORM pg_notify('farm', 'work ' || soc) FROM unnest(socs) AS soc;
END;
$$;

-- Bring jobs and waiting shards in line with the rows of `build` that a statement wrote, in its transaction: a waiting
-- build has a job, other builds have none. A job that an agent is taking is skipped: the agent reads the row of
-- `build`.
CREATE OR REPLACE FUNCTION farm_queue_builds() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
BEGIN
    PERFORM farm_apply_builds(ARRAY(SELECT key FROM changed WHERE state IN ('built', 'failed')));
    DELETE FROM procrastinate_jobs WHERE id IN (
        SELECT id FROM procrastinate_jobs JOIN changed ON queueing_lock = 'build:' || key
        WHERE status = 'todo' AND (state <> 'waiting'
              OR changed.priority > 0 AND procrastinate_jobs.priority <= 0)
        FOR UPDATE OF procrastinate_jobs SKIP LOCKED
    );
    PERFORM farm_defer_builds(ARRAY(SELECT key FROM changed WHERE state = 'waiting'));
    RETURN NULL;
END;
$$;
DROP TRIGGER IF EXISTS farm_build_asked ON build;
CREATE TRIGGER farm_build_asked AFTER INSERT ON build REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION farm_queue_builds();
DROP TRIGGER IF EXISTS farm_build_changed ON build;
CREATE TRIGGER farm_build_changed AFTER UPDATE ON build REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION farm_queue_builds();

-- Take the first build job for `toolchains`; no row without a job. The column `task` is NULL if all runs that wanted
-- the bundle have ended.
CREATE OR REPLACE FUNCTION farm_take_build(worker bigint, toolchains text[])
RETURNS TABLE (job bigint, attempt integer, key text, task text, put_back json)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    taken procrastinate_jobs;
    made build;
BEGIN
    taken := procrastinate_fetch_job_v2(
        ARRAY(SELECT CAST('build:' || md5(one) AS varchar) FROM unnest(toolchains) AS one), worker);
    IF taken.id IS NOT NULL THEN
        -- The login allows no other login to end this job. The arguments of a hostile job may be no object.
        UPDATE procrastinate_jobs SET args = jsonb_build_object(
            'key', args -> 'key', 'user', args -> 'user', 'login', session_user) WHERE id = taken.id;
        SELECT build.* INTO made FROM build
            WHERE build.key = taken.args ->> 'key' AND state = 'waiting' AND EXISTS (
                SELECT 1 FROM build_wanted JOIN run_order USING (run_id)
                WHERE build_wanted.key = build.key AND failure IS NULL AND run_order.state = 'open')
            FOR UPDATE OF build;
        RETURN QUERY SELECT taken.id, taken.attempts, taken.args ->> 'key', made.task, made.put_back;
    END IF;
END;
$$;

-- End a build job, or put it back if `again`; return false if another worker has taken the job meanwhile.
CREATE OR REPLACE FUNCTION farm_end_build(job bigint, attempt integer, again boolean) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
BEGIN
    PERFORM 1 FROM procrastinate_jobs
        WHERE id = job AND attempts = attempt AND status = 'doing' AND task_name = 'farm.build'
          AND args ->> 'login' = session_user FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF again THEN
        PERFORM procrastinate_retry_job_v2(job, NULL, NULL, NULL, NULL);
    ELSE
        PERFORM procrastinate_finish_job_v1(job, 'succeeded', true);
    END IF;
    RETURN true;
END;
$$;

-- Return whether agents can read `answer` (the reply) and `facts` (the manifest) of a build, which hosts write; raise
-- an error for text that is no JSON.
CREATE OR REPLACE FUNCTION farm_is_readable(answer json, facts json) RETURNS boolean
LANGUAGE sql STABLE SET search_path = {schema}, pg_temp AS $$
    SELECT (answer IS NULL OR (json_typeof(answer -> 'key'), json_typeof(answer -> 'ok'), json_typeof(answer -> 'seconds'),
            coalesce(json_typeof(answer -> 'reason'), 'string'), coalesce(json_typeof(answer -> 'infra'), 'boolean'))
            IS NOT DISTINCT FROM ('string', 'boolean', 'number', 'string', 'boolean'))
        AND (facts IS NULL OR json_typeof(facts -> 'seconds') IS NOT DISTINCT FROM 'number' AND (
            SELECT count(*) = 2 FROM unnest(ARRAY[facts -> 'fallback_ops', facts -> 'operators']) AS counts
            WHERE json_typeof(counts) = 'object' AND NOT EXISTS (
                SELECT 1 FROM json_each(CASE json_typeof(counts) WHEN 'object' THEN counts END)
                WHERE json_typeof(value) <> 'number')))
$$;

-- Record the outcome of a build, also without a run that wants it, and end its job; false as `farm_end_build`.
CREATE OR REPLACE FUNCTION farm_record_build(
    job bigint, attempt integer, outcome text, content text, size bigint, answer text, printed text, facts json
) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    made text := (SELECT args ->> 'key' FROM procrastinate_jobs WHERE id = job);
BEGIN
    IF farm_is_readable(CAST(answer AS json), facts) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'farm: the outcome of a bundle cannot be read';
    ELSIF NOT farm_end_build(job, attempt, false) THEN
        RETURN false;
    END IF;
    UPDATE build SET state = CASE outcome WHEN 'built' THEN outcome ELSE 'failed' END, archive = content,
        nbytes = size, reply = answer, log = printed, manifest = facts
    WHERE key = made AND (state = 'waiting' OR state = 'failed' AND outcome = 'built');
    RETURN true;
END;
$$;

-- Return the reply of a build that failed without a fault of its job.
CREATE OR REPLACE FUNCTION farm_infra_reply(key text, reason text) RETURNS text
LANGUAGE sql STABLE SET search_path = {schema}, pg_temp AS $$
    SELECT CAST(
        json_build_object('key', key, 'ok', false, 'seconds', 0, 'reason', left(reason, 2000), 'infra', true) AS text)
$$;

-- Mark the waiting builds of `keys` without a run that wants them as failed.
CREATE OR REPLACE FUNCTION farm_drop_builds(keys text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
    UPDATE build SET state = 'failed', reply = farm_infra_reply('', 'no run wanted it any more')
    WHERE key = ANY(keys) AND state = 'waiting' AND NOT EXISTS (
        SELECT 1 FROM build_wanted WHERE build_wanted.key = build.key AND failure IS NULL)
$$;

-- Put a build back for another host; with a reason in `why`, `host` does not get it again. If every living host of its
-- toolchain has put it back, the build fails as infra with all their reasons. False as `farm_end_build`.
-- A host that takes the build once more calls this function again, as the other hosts may have died meanwhile. Only its
-- first call notifies: a later notification would wake the same host at once.
CREATE OR REPLACE FUNCTION farm_put_back_build(job bigint, attempt integer, host text, why text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    made build;
    tried jsonb;
    again boolean;
BEGIN
    SELECT build.* INTO made FROM build JOIN procrastinate_jobs ON procrastinate_jobs.args ->> 'key' = build.key
        WHERE procrastinate_jobs.id = job;
    tried := CAST(made.put_back AS jsonb) || CASE why WHEN '' THEN '{{}}' ELSE jsonb_build_object(host, why) END;
    again := why = '' OR EXISTS (
        SELECT 1 FROM agent
        WHERE NOT has_left AND expires_ms > extract(epoch FROM clock_timestamp()) * 1000
          AND jsonb_exists(CAST(facts AS jsonb) -> 'toolchains', made.toolchain) AND NOT jsonb_exists(tried, name));
    IF NOT farm_end_build(job, attempt, again) THEN
        RETURN false;
    END IF;
    UPDATE build SET put_back = CAST(tried AS json) WHERE key = made.key;
    IF again THEN
        PERFORM farm_drop_builds(ARRAY[made.key]);
        IF NOT jsonb_exists(CAST(made.put_back AS jsonb), host) THEN
            PERFORM pg_notify('farm', 'build ' || made.toolchain);
        END IF;
    ELSE
        UPDATE build SET state = 'failed', reply = farm_infra_reply(key, (
            SELECT string_agg(one.key || ': ' || one.value, '; ' ORDER BY one.key) FROM jsonb_each_text(tried) AS one))
        WHERE key = made.key AND state = 'waiting';
    END IF;
    RETURN true;
END;
$$;

-- Mark a build with an unreadable row as failed, and cancel the runs that want it; false as `farm_end_build`.
CREATE OR REPLACE FUNCTION farm_refuse_build(job bigint, attempt integer, why text, refused_by text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    made text := (SELECT args ->> 'key' FROM procrastinate_jobs WHERE id = job);
BEGIN
    IF NOT starts_with(refused_by, 'farm: ') OR NOT farm_end_build(job, attempt, false) THEN
        RETURN false;
    END IF;
    UPDATE run_order SET state = 'cancelled', cancelled_by = refused_by
        WHERE state <> 'ended' AND run_id IN (SELECT run_id FROM build_wanted WHERE key = made);
    UPDATE build SET state = 'failed', reply = farm_infra_reply(key, why) WHERE key = made;
    RETURN true;
END;
$$;

-- Put back the messages of workers without a heartbeat for `silent_s` seconds, and return the number of messages.
-- Messages are put back one by one: a duplicate of a waiting message is removed, and an error of one message does not
-- stop the others. Before the server has been up for `silent_s`, no worker counts as dead. Procrastinate's own retry
-- would use the clock of the caller.
CREATE OR REPLACE FUNCTION farm_retry_messages(silent_s double precision) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    held record;
    retried integer := 0;
BEGIN
    IF now() - pg_postmaster_start_time() < make_interval(secs => silent_s) THEN
        RETURN 0;
    END IF;
    PERFORM procrastinate_prune_stalled_workers_v1(silent_s);
    FOR held IN
        SELECT id, queue_name, task_name FROM procrastinate_jobs
        WHERE status = 'doing' AND worker_id IS NULL FOR UPDATE SKIP LOCKED
    LOOP
        BEGIN
            PERFORM procrastinate_retry_job_v2(held.id, NULL, NULL, NULL, NULL);
        EXCEPTION
            WHEN unique_violation THEN
                -- Another message with its queueing lock waits already.
                PERFORM procrastinate_finish_job_v1(held.id, 'failed', true);
                CONTINUE;
            WHEN data_exception OR integrity_constraint_violation OR raise_exception THEN
                RAISE WARNING 'farm: message % stays with its dead worker: %', held.id, SQLERRM;
                CONTINUE;
        END;
        -- Procrastinate notifies workers only of new messages.
        PERFORM pg_notify(
            'procrastinate_queue_v1#' || held.queue_name,
            json_build_object('type', 'job_inserted', 'job_id', held.id)::text
        );
        IF held.task_name = 'farm.build' THEN
            PERFORM pg_notify('farm', 'build');
        END IF;
        retried := retried + 1;
    END LOOP;
    RETURN retried;
END;
$$;

-- Remove messages that ended more than `hours` ago, and return their number.
CREATE OR REPLACE FUNCTION farm_remove_ended_messages(hours double precision) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
    WITH gone AS (
        DELETE FROM procrastinate_jobs AS job
        WHERE status NOT IN ('todo', 'doing') AND NOT EXISTS (
            SELECT 1 FROM procrastinate_events AS event
            WHERE event.job_id = job.id AND event.at > now() - make_interval(secs => hours * 3600)
        )
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;

-- Let Procrastinate's functions, too, run as their owner, and revoke the default right of every login to call them.
DO $$
DECLARE
    one regprocedure;
BEGIN
    FOR one IN
        SELECT oid FROM pg_proc
        WHERE pronamespace = '{schema}'::regnamespace AND prokind = 'f'
        AND (proname LIKE 'procrastinate\_%' OR proname IN (
            'farm_finish_runs', 'farm_shards_released', 'farm_run_cancelled', 'farm_defer_builds', 'farm_apply_builds',
            'farm_queue_builds', 'farm_take_build', 'farm_end_build', 'farm_record_build',
            'farm_drop_builds', 'farm_put_back_build', 'farm_refuse_build', 'farm_retry_messages', 'farm_remove_ended_messages'
        ))
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %s, pg_temp', one, '{schema}');
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', one);
    END LOOP;
END;
$$;
