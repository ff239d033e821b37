-- Guards of rows that a group may not write although it has a right to the table. They apply to all users but the
-- owner, and most of them to developers alone. `session_user` is the login, independent of $LOGNAME and SET ROLE.
--
-- Each function searches {schema} and PostgreSQL's own schema alone for tables, functions and operators.

CREATE OR REPLACE FUNCTION farm_refuse(reason text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE insufficient_privilege USING MESSAGE = format('farm: %s (you signed in as %s)', reason, session_user);
END;
$$;

CREATE OR REPLACE FUNCTION farm_now_ms() RETURNS bigint LANGUAGE sql AS $$
    SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)
$$;

-- Return whether a run belongs to the login.
CREATE OR REPLACE FUNCTION farm_is_mine(run text) RETURNS boolean LANGUAGE sql STABLE
SET search_path = {schema}, pg_temp AS $$
    SELECT EXISTS (SELECT 1 FROM run WHERE run.id = $1 AND run.user_name = session_user)
$$;

-- Runs and remarks carry the name of the login. Applies to agents as well.
CREATE OR REPLACE FUNCTION farm_guard_name() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    PERFORM farm_refuse(format('%s is recorded in the name of %s', TG_TABLE_NAME, NEW.user_name));
    RETURN NULL;
END;
$$;

CREATE OR REPLACE FUNCTION farm_guard_alert() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF OLD.state NOT IN ('exact', 'suspected') THEN
        PERFORM farm_refuse('a measured alert cannot be deleted');
    END IF;
    RETURN OLD;
END;
$$;

-- Ended runs of other users are neither changed nor extended. Applies to agents as well.
CREATE OR REPLACE FUNCTION farm_guard_ended() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
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

CREATE OR REPLACE FUNCTION farm_guard_order_end() RETURNS trigger
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

CREATE OR REPLACE FUNCTION farm_guard_run() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.user_name <> session_user THEN
        PERFORM farm_refuse(format('run %s is %s''s', OLD.id, OLD.user_name));
    END IF;
    IF NEW.finished_ms IS NOT NULL OR NEW.exit_code IS NOT NULL THEN
        PERFORM farm_refuse('only agents record the end of a run');
    END IF;
    RETURN NEW;
END;
$$;

CREATE OR REPLACE FUNCTION farm_guard_run_job() RETURNS trigger
LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' AND (NEW.decisive_attempt_id IS NOT NULL OR NEW.decisive_verdict IS NOT NULL) THEN
        PERFORM farm_refuse('only agents record results');
    END IF;
    IF NOT farm_is_mine(NEW.run_id) THEN
        PERFORM farm_refuse(format('run %s is not yours', NEW.run_id));
    END IF;
    RETURN NEW;
END;
$$;

CREATE OR REPLACE FUNCTION farm_guard_order() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF NEW.user_name <> session_user OR NOT farm_is_mine(NEW.run_id)
        OR (TG_OP = 'UPDATE' AND OLD.user_name <> session_user) THEN
        PERFORM farm_refuse(format('run %s is not yours to submit or to cancel', NEW.run_id));
    END IF;
    IF NEW.priority NOT IN (0, 1) OR NEW.state NOT IN ('open', 'cancelled') AND
        (TG_OP = 'INSERT' OR NEW.state <> OLD.state) THEN
        PERFORM farm_refuse('a run may be submitted or cancelled; only agents end it');
    END IF;
    IF NEW.cancelled_by NOT IN ('', session_user) THEN
        PERFORM farm_refuse('cancelled_by must be your own login');
    END IF;
    RETURN NEW;
END;
$$;

CREATE OR REPLACE FUNCTION farm_guard_shard() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF NOT farm_is_mine(NEW.run_id) OR NEW.state <> 'waiting' OR NEW.token <> '' OR NEW.fence <> 0 THEN
        PERFORM farm_refuse('a new shard must wait and belong to a run of yours');
    END IF;
    RETURN NEW;
END;
$$;

CREATE OR REPLACE FUNCTION farm_guard_shard_jobs() RETURNS trigger
LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM shard WHERE id = NEW.shard AND state = 'waiting' AND farm_is_mine(run_id)) THEN
        PERFORM farm_refuse(format('shard %s is not yours', NEW.shard));
    END IF;
    RETURN NEW;
END;
$$;

CREATE OR REPLACE FUNCTION farm_guard_build() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF NEW.user_name NOT IN ('', session_user) AND (TG_OP = 'INSERT' OR NEW.user_name <> OLD.user_name) THEN
        PERFORM farm_refuse(format('the build is requested in the name of %s', NEW.user_name));
    END IF;
    IF NEW.priority NOT IN (0, 1) OR NEW.put_back::jsonb <> jsonb_build_object()
        AND (TG_OP = 'INSERT' OR NEW.put_back::text <> OLD.put_back::text) THEN
        PERFORM farm_refuse('only agents make bundles');
    END IF;
    IF farm_is_readable(CAST(NEW.reply AS json), NEW.manifest) IS NOT TRUE THEN
        PERFORM farm_refuse('the outcome of a bundle cannot be read');
    END IF;
    IF TG_OP = 'INSERT' THEN
        RETURN NEW;
    END IF;
    IF NEW.key <> OLD.key OR OLD.state = 'built' AND NEW.state = 'failed' THEN
        PERFORM farm_refuse('a built bundle cannot be marked as failed or get another key');
    END IF;
    IF OLD.archive <> '' THEN
        -- The first archive stays, as others may run it already, also while an agent makes the bundle anew.
        NEW.archive := OLD.archive;
        NEW.nbytes := OLD.nbytes;
        NEW.manifest := coalesce(OLD.manifest, NEW.manifest);
    END IF;
    IF OLD.state = 'waiting' AND EXISTS (
        SELECT 1 FROM build_wanted JOIN run_order USING (run_id)
        WHERE build_wanted.key = OLD.key AND failure IS NULL AND run_order.state = 'open'
            AND run_order.user_name <> session_user
    ) THEN
        -- A user who builds on his own machine cannot fail the bundle for others, as agents may be able to make it.
        IF NEW.state = 'failed' THEN
            RETURN NULL;
        END IF;
        NEW.task := OLD.task;
        NEW.toolchain := OLD.toolchain;
        NEW.put_back := OLD.put_back;
    END IF;
    RETURN NEW;
END;
$$;

-- A build host writes only agents of its own login, as other agents read the facts of agents when they start.
CREATE OR REPLACE FUNCTION farm_guard_agent() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF NEW.user_name <> session_user OR TG_OP = 'UPDATE' AND OLD.user_name <> session_user THEN
        PERFORM farm_refuse(format('agent %s is of another login', NEW.name));
    ELSIF (CAST(NEW.facts AS jsonb) ->> 'protocol' ~ '^[0-9]{1,4}$') IS NOT TRUE THEN
        PERFORM farm_refuse('the facts of an agent need a protocol number');
    END IF;
    RETURN NEW;
END;
$$;

CREATE OR REPLACE FUNCTION farm_guard_wanted() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM shard WHERE id = NEW.shard AND run_id = NEW.run_id AND farm_is_mine(run_id)) THEN
        PERFORM farm_refuse(format('run %s is not yours', NEW.run_id));
    END IF;
    RETURN NEW;
END;
$$;

CREATE OR REPLACE FUNCTION farm_guard_lease() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
DECLARE
    now_ms bigint := farm_now_ms();
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.token <> '' OR NEW.fence <> 0 OR NEW.reserved_for <> '' OR NEW.wanted_by <> '' THEN
            PERFORM farm_refuse('a new lease row must be free');
        END IF;
        RETURN NEW;
    END IF;
    IF NEW.device <> OLD.device OR NEW.fence < OLD.fence OR NEW.fence > OLD.fence + 1
        OR (NEW.token NOT IN ('', OLD.token) AND NEW.fence <> OLD.fence + 1) THEN
        PERFORM farm_refuse('a lease keeps its device, and a new owner gets the next fence');
    END IF;
    IF OLD.token <> '' AND OLD.expires_ms > now_ms THEN
        IF OLD.user_name <> session_user THEN
            PERFORM farm_refuse(format('%s is leased by %s', OLD.device, OLD.user_name));
        END IF;
        IF EXISTS (SELECT 1 FROM agent WHERE agent.token = OLD.token AND NOT has_left) THEN
            PERFORM farm_refuse(format('%s is in use by your run: end it with farm runs cancel', OLD.device));
        END IF;
    END IF;
    IF OLD.reserved_for NOT IN ('', session_user) AND OLD.reserved_until_ms > now_ms AND (
        NEW.reserved_for <> OLD.reserved_for OR NEW.reserved_until_ms <> OLD.reserved_until_ms
        OR NEW.reserved_from_ms <> OLD.reserved_from_ms OR NEW.token <> OLD.token AND OLD.reserved_from_ms <= now_ms
    ) THEN
        PERFORM farm_refuse(format('%s is reserved for %s', OLD.device, OLD.reserved_for));
    END IF;
    IF NEW.reserved_for NOT IN ('', session_user) AND NEW.reserved_for <> OLD.reserved_for
        OR NEW.user_name <> session_user AND NEW.user_name <> OLD.user_name
        OR NEW.token <> '' AND NEW.user_name <> session_user OR NEW.priority NOT IN (0, 1) THEN
        PERFORM farm_refuse(format('%s may be leased or reserved only for your own login', OLD.device));
    END IF;
    RETURN NEW;
END;
$$;

CREATE OR REPLACE FUNCTION farm_guard_waiter() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF TG_OP <> 'INSERT' AND OLD.user_name <> session_user
        -- Any login may delete a waiter that died an hour ago.
        AND NOT (TG_OP = 'DELETE' AND OLD.expires_ms < farm_now_ms() - 3600000) THEN
        PERFORM farm_refuse(format('the waiter belongs to %s', OLD.user_name));
    END IF;
    IF TG_OP <> 'DELETE' AND (NEW.user_name <> session_user OR NEW.priority NOT IN (0, 1)) THEN
        PERFORM farm_refuse('a waiter must have your own login');
    END IF;
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END;
$$;

-- Durations for the division of shards belong to the login that wrote them, and are of no use after half a day. Applies
-- to agents as well.
CREATE OR REPLACE FUNCTION farm_guard_weights() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF OLD.user_name <> session_user AND OLD.asked_ms > farm_now_ms() - 86400000 THEN
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

CREATE OR REPLACE FUNCTION farm_guard_device() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$
DECLARE
    service text[] := ARRAY['in_service', 'service_note', 'service_user'];
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.health <> 'healthy' OR NOT NEW.in_service THEN
            PERFORM farm_refuse(format('the new device %s must be healthy and in service', NEW.id));
        END IF;
        RETURN NEW;
    END IF;
    IF NEW.health <> OLD.health OR NEW.health_reason <> OLD.health_reason THEN
        PERFORM farm_refuse('only agents record the health of a device');
    END IF;
    IF (NEW.in_service, NEW.service_note, NEW.service_user) IS DISTINCT FROM
        (OLD.in_service, OLD.service_note, OLD.service_user) AND NEW.service_user <> session_user THEN
        PERFORM farm_refuse('service_user must be your own login');
    END IF;
    IF to_jsonb(NEW) - service <> to_jsonb(OLD) - service
        AND EXISTS (SELECT 1 FROM agent_device WHERE device = OLD.id) THEN
        PERFORM farm_refuse(format('%s is attached to the host of an agent, which alone may change it', OLD.id));
    END IF;
    RETURN NEW;
END;
$$;

DO $$
DECLARE
    one record;
    -- Functions that run as the owner act for their callers.
    owners text := format('(pg_has_role(session_user, %L, ''MEMBER'') OR current_user = %1$L)', {tables_owner_text});
    trusted text := format('(%s OR pg_has_role(session_user, %L, ''MEMBER''))', owners, '{agent}');
BEGIN
    FOR one IN SELECT tgname, tgrelid::regclass AS of FROM pg_trigger
        JOIN pg_class ON pg_class.oid = tgrelid
        WHERE relnamespace = '{schema}'::regnamespace AND tgname LIKE 'farm\_guard\_%'
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', one.tgname, one.of);
    END LOOP;
    FOR one IN SELECT * FROM (VALUES
        ('run', 'INSERT OR UPDATE', 'farm_guard_run'),
        ('run_job', 'INSERT OR UPDATE', 'farm_guard_run_job'),
        ('run_order', 'INSERT OR UPDATE', 'farm_guard_order'),
        ('shard', 'INSERT', 'farm_guard_shard'),
        ('shard_jobs', 'INSERT', 'farm_guard_shard_jobs'),
        ('build', 'INSERT OR UPDATE', 'farm_guard_build'),
        ('build_wanted', 'INSERT', 'farm_guard_wanted'),
        ('agent', 'INSERT OR UPDATE', 'farm_guard_agent'),
        ('lease', 'INSERT OR UPDATE', 'farm_guard_lease'),
        ('waiter', 'INSERT OR UPDATE OR DELETE', 'farm_guard_waiter'),
        ('device_state', 'INSERT OR UPDATE', 'farm_guard_device')
    ) AS guards (of, events, guard) LOOP
        EXECUTE format(
            'CREATE TRIGGER %I BEFORE %s ON %I FOR EACH ROW WHEN (NOT %s) EXECUTE FUNCTION %I()',
            one.guard, one.events, one.of, trusted, one.guard
        );
    END LOOP;
    FOR one IN SELECT unnest(ARRAY['run', 'run_order', 'triage']) AS of LOOP
        EXECUTE format(
            'CREATE TRIGGER farm_guard_name BEFORE INSERT ON %I FOR EACH ROW '
            'WHEN (NEW.user_name <> session_user AND NOT %s) EXECUTE FUNCTION farm_guard_name()', one.of, owners
        );
    END LOOP;
    FOR one IN SELECT * FROM (VALUES
        ('run', 'UPDATE'), ('run_job', 'INSERT OR UPDATE'), ('attempt', 'INSERT'), ('artifact', 'INSERT'),
        ('comparison', 'INSERT'), ('counter', 'INSERT'), ('layer', 'INSERT'), ('measurement', 'INSERT'),
        ('op_profile', 'INSERT')
    ) AS history (of, events) LOOP
        EXECUTE format(
            'CREATE TRIGGER farm_guard_ended BEFORE %s ON %I FOR EACH ROW WHEN (NOT %s) '
            'EXECUTE FUNCTION farm_guard_ended()', one.events, one.of, owners
        );
    END LOOP;
    EXECUTE format(
        'CREATE TRIGGER farm_guard_weights BEFORE INSERT OR UPDATE OR DELETE ON shard_weights FOR EACH ROW '
        'WHEN (NOT %s) EXECUTE FUNCTION farm_guard_weights()', owners
    );
    EXECUTE format(
        'CREATE TRIGGER farm_guard_order_end BEFORE UPDATE ON run_order FOR EACH ROW '
        'WHEN (OLD.user_name <> session_user AND NOT %s) EXECUTE FUNCTION farm_guard_order_end()', owners
    );
    EXECUTE format(
        'CREATE TRIGGER farm_guard_alert BEFORE DELETE ON alert FOR EACH ROW WHEN (NOT %s) '
        'EXECUTE FUNCTION farm_guard_alert()', owners
    );
END;
$$;
