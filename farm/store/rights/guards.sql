-- Guards of rows that a group may not write although it has a right to the table. They apply to agents and build hosts:
-- the owner and the server write in the name of others. `session_user` is the login, independent of $LOGNAME and SET ROLE.
--
-- Each function searches {schema} and PostgreSQL's own schema alone for tables, functions and operators.

-- Begin without guards: an earlier version had more.
DO $$
DECLARE
    one record;
BEGIN
    FOR one IN SELECT tgname, tgrelid::regclass AS of FROM pg_trigger
        JOIN pg_class ON pg_class.oid = tgrelid
        WHERE relnamespace = '{schema}'::regnamespace AND tgname LIKE 'farm\_guard\_%'
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', one.tgname, one.of);
    END LOOP;
    FOR one IN SELECT oid::regprocedure AS name FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace
        AND (proname LIKE 'farm\_guard\_%' OR proname IN ('farm_refuse', 'farm_now_ms', 'farm_is_mine'))
    LOOP
        EXECUTE format('DROP FUNCTION %s', one.name);
    END LOOP;
END;
$$;

CREATE FUNCTION farm_refuse(reason text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE insufficient_privilege USING MESSAGE = format('farm: %s (you signed in as %s)', reason, session_user);
END;
$$;

-- Runs and remarks carry the name of the login.
CREATE FUNCTION farm_guard_name() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    PERFORM farm_refuse(format('%s is recorded in the name of %s', TG_TABLE_NAME, NEW.user_name));
    RETURN NULL;
END;
$$;

CREATE FUNCTION farm_guard_alert() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF OLD.state NOT IN ('exact', 'suspected') THEN
        PERFORM farm_refuse('a measured alert cannot be deleted');
    END IF;
    RETURN OLD;
END;
$$;

-- Ended runs of other users are neither changed nor extended.
CREATE FUNCTION farm_guard_ended() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
DECLARE
    of_run text;
BEGIN
    IF TG_TABLE_NAME = 'run' THEN
        of_run := OLD.id;
    ELSIF TG_TABLE_NAME = 'run_job' THEN
        of_run := NEW.run_id;
    ELSIF TG_TABLE_NAME = 'attempt' THEN
        of_run := (SELECT run_id FROM run_job WHERE id = NEW.run_job_id);
    ELSE
        of_run := (SELECT run_id FROM attempt JOIN run_job ON run_job.id = run_job_id WHERE attempt.id = NEW.attempt_id);
    END IF;
    IF EXISTS (SELECT 1 FROM run WHERE id = of_run AND finished_ms IS NOT NULL AND user_name <> session_user) THEN
        PERFORM farm_refuse(format('run %s has ended', of_run));
    END IF;
    RETURN NEW;
END;
$$;

CREATE FUNCTION farm_guard_order_end() RETURNS trigger
LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
DECLARE
    free text[] := ARRAY['state', 'cancelled_by', 'ended_ms', 'failures'];
BEGIN
    IF OLD.state = 'ended' THEN
        PERFORM farm_refuse(format('run %s has ended', OLD.run_id));
    ELSIF to_jsonb(NEW) - free <> to_jsonb(OLD) - free THEN
        PERFORM farm_refuse(format('an agent may not change these columns of run %s', OLD.run_id));
    END IF;
    RETURN NEW;
END;
$$;

-- A build host writes only agents of its own login, as other agents read the facts of agents when they start.
CREATE FUNCTION farm_guard_agent() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF NEW.user_name <> session_user OR TG_OP = 'UPDATE' AND OLD.user_name <> session_user THEN
        PERFORM farm_refuse(format('agent %s is of another login', NEW.name));
    ELSIF (CAST(NEW.facts AS jsonb) ->> 'protocol' ~ '^[0-9]{1,4}$') IS NOT TRUE THEN
        PERFORM farm_refuse('the facts of an agent need a protocol number');
    END IF;
    RETURN NEW;
END;
$$;

-- Durations for the division of shards belong to the login that wrote them, and are of no use after half a day.
CREATE FUNCTION farm_guard_weights() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF OLD.user_name <> session_user AND OLD.asked_ms > extract(epoch FROM clock_timestamp()) * 1000 - 86400000 THEN
            PERFORM farm_refuse(format('the durations belong to %s', OLD.user_name));
        END IF;
        RETURN OLD;
    END IF;
    IF NEW.user_name <> session_user OR TG_OP = 'UPDATE' AND OLD.user_name <> session_user THEN
        PERFORM farm_refuse('durations must have your own login');
    END IF;
    RETURN NEW;
END;
$$;

DO $$
DECLARE
    one record;
    server text := CASE WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = '{server}')
        THEN ' OR pg_has_role(session_user, ''{server}'', ''MEMBER'')' ELSE '' END;
    -- Functions that run as the owner act for their callers.
    trusted text := format(
        '(pg_has_role(session_user, %L, ''MEMBER'') OR current_user = %1$L%s)', {tables_owner_text}, server);
BEGIN
    FOR one IN SELECT * FROM (VALUES
        ('agent', 'INSERT OR UPDATE', 'pg_has_role(session_user, ''{agent}'', ''MEMBER'')', 'farm_guard_agent'),
        ('alert', 'DELETE', 'false', 'farm_guard_alert'),
        ('run_order', 'UPDATE', 'OLD.user_name = session_user', 'farm_guard_order_end'),
        ('shard_weights', 'INSERT OR UPDATE OR DELETE', 'false', 'farm_guard_weights'),
        ('run', 'INSERT', 'NEW.user_name = session_user', 'farm_guard_name'),
        ('run_order', 'INSERT', 'NEW.user_name = session_user', 'farm_guard_name'),
        ('triage', 'INSERT', 'NEW.user_name = session_user', 'farm_guard_name'),
        ('run', 'UPDATE', 'false', 'farm_guard_ended'),
        ('run_job', 'INSERT OR UPDATE', 'false', 'farm_guard_ended')
    ) AS guards (of, events, free, guard)
    UNION ALL SELECT history, 'INSERT', 'false', 'farm_guard_ended' FROM unnest(ARRAY[
        'attempt', 'artifact', 'comparison', 'counter', 'layer', 'measurement', 'op_profile'
    ]) AS history
    LOOP
        EXECUTE format('CREATE TRIGGER %I BEFORE %s ON %I FOR EACH ROW WHEN (NOT (%s OR %s)) EXECUTE FUNCTION %1$I()',
            one.guard, one.events, one.of, one.free, trusted);
    END LOOP;
END;
$$;
