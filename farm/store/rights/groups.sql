-- Groups, which nobody signs in as: GRANT {developer} TO ada. They belong to the server, not to one database.
-- For this alone one has to be a superuser, or have CREATEROLE.
DO $$
DECLARE
    one text;
BEGIN
    FOREACH one IN ARRAY ARRAY['{owner}', '{agent}', '{developer}', '{viewer}'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = one) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', one);
        END IF;
    END LOOP;
    -- Whoever may do all that the owner of the tables may: upgrade, prune, import, set quotas. Not of a superuser's
    -- tables, whose members could be superusers.
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = {tables_owner_text}) AND '{owner}' <> {tables_owner_text} AND NOT pg_has_role('{owner}', {tables_owner_text}, 'MEMBER') THEN
        GRANT {tables_owner} TO {owner};
    END IF;
END;
$$;
