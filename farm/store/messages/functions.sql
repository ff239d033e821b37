-- What farm adds to Procrastinate's tables. {schema} is where they are.
--
-- Every function runs as the owner of the tables, so that nobody needs the right to write them, and finds tables,
-- functions and operators nowhere but there and in PostgreSQL's own schema.

-- Send the message that a run is to be finished, unless it waits already.
CREATE OR REPLACE FUNCTION farm_finish(run text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
BEGIN
    PERFORM procrastinate_defer_jobs_v1(ARRAY[
        ROW('farm', 'farm.finish', 50, NULL, 'finish:' || run, jsonb_build_object('run', run), NULL)
    ]::procrastinate_job_to_defer_v1[]);
EXCEPTION WHEN unique_violation THEN
    NULL;
END;
$$;

-- Put back the messages of workers without a heartbeat for some seconds, and return how many messages those were.
-- Message by message: a duplicate of a waiting message is removed, and an error of one message concerns no other.
-- No worker is dead until the server has been up for as long. Procrastinate's own way asks the clock of the caller.
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
        SELECT id, queue_name FROM procrastinate_jobs
        WHERE status = 'doing' AND worker_id IS NULL FOR UPDATE SKIP LOCKED
    LOOP
        BEGIN
            PERFORM procrastinate_retry_job_v2(held.id, NULL, NULL, NULL, NULL);
        EXCEPTION
            WHEN unique_violation THEN
                -- A message with its queueing lock waits already.
                PERFORM procrastinate_finish_job_v1(held.id, 'failed', true);
                CONTINUE;
            WHEN data_exception OR integrity_constraint_violation OR raise_exception THEN
                RAISE WARNING 'farm: message % stays with its dead worker: %', held.id, SQLERRM;
                CONTINUE;
        END;
        -- Procrastinate notifies of new messages alone.
        PERFORM pg_notify(
            'procrastinate_queue_v1#' || held.queue_name,
            json_build_object('type', 'job_inserted', 'job_id', held.id)::text
        );
        retried := retried + 1;
    END LOOP;
    RETURN retried;
END;
$$;

-- Remove messages that ended, and return how many.
CREATE OR REPLACE FUNCTION farm_tidy_messages(hours double precision) RETURNS bigint
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

-- Procrastinate's functions, too, run as their owner, and nobody calls any who was not allowed to.
DO $$
DECLARE
    one regprocedure;
BEGIN
    FOR one IN
        SELECT oid FROM pg_proc
        WHERE pronamespace = '{schema}'::regnamespace AND prokind = 'f'
        AND (proname LIKE 'procrastinate\_%' OR proname IN (
            'farm_finish', 'farm_retry_messages', 'farm_tidy_messages'
        ))
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %s, pg_temp', one, '{schema}');
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', one);
    END LOOP;
END;
$$;
