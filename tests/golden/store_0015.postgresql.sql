-- Schema 0015 of farm 0.2.0 on PostgreSQL, as pg_dump writes it; store.sql has the schema of SQLite.
CREATE FUNCTION attempt_decides() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path TO 'public',
  'pg_temp' AS $$ BEGIN UPDATE run_job SET decisive_attempt_id = NEW.id, decisive_verdict = NEW.verdict WHERE id =
  NEW.run_job_id AND (decisive_verdict IS NULL OR decisive_verdict = 'infra' OR NEW.verdict <> 'infra'); RETURN NULL;
  END $$;
CREATE TABLE agent (name character varying(256) NOT NULL, token character varying(64) NOT NULL, user_name character
  varying(256) NOT NULL, facts text NOT NULL, started_ms bigint NOT NULL, heartbeat_ms bigint NOT NULL, expires_ms
  bigint NOT NULL, has_left boolean NOT NULL, is_draining boolean NOT NULL);
CREATE TABLE agent_device (device character varying(256) NOT NULL, agent character varying(256) NOT NULL, soc
  character varying(64) NOT NULL, kind character varying(16) NOT NULL, os character varying(16) NOT NULL, serial
  character varying(256) NOT NULL, name character varying(256) NOT NULL, labels json NOT NULL, refused text NOT NULL);
CREATE TABLE alert (id bigint NOT NULL, series_id bigint NOT NULL, device_kind character varying(16) NOT NULL, run_id
  character varying(64) NOT NULL, finding character varying(16) NOT NULL, state character varying(16) NOT NULL,
  last_good character varying(64) NOT NULL, first_bad character varying(64) NOT NULL, change double precision, low
  double precision, high double precision, p_value double precision, reason text NOT NULL, guilt text NOT NULL, device
  character varying(256) NOT NULL, pairs json, found_ms bigint NOT NULL, alert_line character varying(256) DEFAULT
  ''::character varying NOT NULL, alert_private boolean DEFAULT false NOT NULL);
CREATE SEQUENCE alert_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE alert_id_seq OWNED BY alert.id;
CREATE TABLE artifact (id bigint NOT NULL, attempt_id bigint NOT NULL, sha256 character varying(64) NOT NULL, size
  bigint NOT NULL, kind character varying(64) NOT NULL);
CREATE SEQUENCE artifact_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE artifact_id_seq OWNED BY artifact.id;
CREATE TABLE attempt (id bigint NOT NULL, run_job_id bigint NOT NULL, digest character varying(64), device_id bigint,
  verdict character varying(16) NOT NULL, stage character varying(16) NOT NULL, reason text NOT NULL, started_ms
  bigint NOT NULL, recorded_ms bigint NOT NULL, seconds double precision NOT NULL, bundle_key character varying(128)
  NOT NULL, known_issue text NOT NULL, notes json NOT NULL, log text NOT NULL, cause character varying(16) DEFAULT
  ''::character varying NOT NULL);
CREATE SEQUENCE attempt_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE attempt_id_seq OWNED BY attempt.id;
CREATE TABLE build (key character varying(128) NOT NULL, toolchain character varying(128) NOT NULL, task text NOT
  NULL, user_name character varying(256) NOT NULL, priority integer NOT NULL, "position" integer NOT NULL, state
  character varying(16) NOT NULL, put_back json NOT NULL, archive character varying(64) NOT NULL, nbytes bigint NOT
  NULL, manifest json, reply text, log text NOT NULL, asked_ms bigint NOT NULL);
CREATE TABLE build_wanted (shard bigint NOT NULL, job character varying(512) NOT NULL, key character varying(128) NOT
  NULL, run_id character varying(64) NOT NULL, failure text);
CREATE TABLE comparison (attempt_id bigint NOT NULL, "position" integer NOT NULL, output integer NOT NULL, reference
  character varying(16) NOT NULL, sqnr_db double precision, cosine double precision, max_abs double precision,
  mismatch double precision, nan_figures json NOT NULL, violations json NOT NULL, peak double precision, steps double
  precision, loss_db double precision, output_name character varying(128) DEFAULT ''::character varying NOT NULL);
CREATE TABLE counter (attempt_id bigint NOT NULL, "position" integer NOT NULL, series_id bigint NOT NULL, n integer
  NOT NULL, value bigint NOT NULL, max bigint NOT NULL, samples bytea NOT NULL);
CREATE TABLE device (id bigint NOT NULL, serial character varying(256) NOT NULL, soc character varying(64) NOT NULL,
  kind character varying(16) NOT NULL, build character varying(256) NOT NULL);
CREATE SEQUENCE device_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE device_id_seq OWNED BY device.id;
CREATE TABLE device_state (id character varying(256) NOT NULL, serial character varying(256) NOT NULL, host character
  varying(256) NOT NULL, soc character varying(64) NOT NULL, kind character varying(16) NOT NULL, os character
  varying(16) NOT NULL, product character varying(256) NOT NULL, name character varying(256) NOT NULL, labels json NOT
  NULL, in_service boolean NOT NULL, service_note text NOT NULL, service_user character varying(256) NOT NULL, health
  character varying(16) NOT NULL, health_reason text NOT NULL, status json, state character varying(64) NOT NULL,
  last_seen_ms bigint NOT NULL, forgotten_ms bigint DEFAULT '0'::bigint NOT NULL);
CREATE TABLE farm_schema (version_num character varying(32) NOT NULL);
CREATE TABLE fingerprint (hash character varying(64) NOT NULL, facts json NOT NULL);
CREATE TABLE health_event (id bigint NOT NULL, device character varying(256) NOT NULL, time_ms bigint NOT NULL, event
  character varying(64) NOT NULL, state character varying(16) NOT NULL, reason text NOT NULL, detail json NOT NULL,
  latency_ns bytea NOT NULL);
CREATE SEQUENCE health_event_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE health_event_id_seq OWNED BY health_event.id;
CREATE TABLE job (id bigint NOT NULL, name character varying(512) NOT NULL, suite character varying(64) NOT NULL,
  case_name character varying(64) NOT NULL, soc character varying(64) NOT NULL, backend character varying(16) NOT
  NULL, "precision" character varying(32) NOT NULL, options json NOT NULL);
CREATE SEQUENCE job_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE job_id_seq OWNED BY job.id;
CREATE TABLE layer (attempt_id bigint NOT NULL, "position" integer NOT NULL, layer character varying(256) NOT NULL,
  operator character varying(256) NOT NULL, step character varying(16) NOT NULL, mse double precision, sqnr_db double
  precision, cosine double precision, nan_figures json NOT NULL, diverges boolean NOT NULL);
CREATE TABLE lease (device character varying(256) NOT NULL, fence bigint NOT NULL, token character varying(64) NOT
  NULL, user_name character varying(256) NOT NULL, host character varying(256) NOT NULL, pid bigint NOT NULL, purpose
  text NOT NULL, priority integer NOT NULL, acquired_ms bigint NOT NULL, expires_ms bigint NOT NULL, reserved_for
  character varying(256) NOT NULL, reserved_until_ms bigint NOT NULL, wanted_by character varying(256) DEFAULT
  ''::character varying NOT NULL);
CREATE TABLE measurement (attempt_id bigint NOT NULL, "position" integer NOT NULL, series_id bigint NOT NULL, n
  integer NOT NULL, min double precision, p10 double precision, p50 double precision, p90 double precision, p99 double
  precision, mean double precision, mad double precision, samples bytea NOT NULL);
CREATE TABLE night_start (name character varying(128) NOT NULL, due_ms bigint NOT NULL, state character varying(16)
  NOT NULL, agent character varying(256) NOT NULL, token character varying(64) NOT NULL, started_ms bigint NOT NULL,
  ended_ms bigint, exit_code integer, why text NOT NULL);
CREATE TABLE op_profile (attempt_id bigint NOT NULL, "position" integer NOT NULL, node character varying(256) NOT
  NULL, delegate character varying(256) NOT NULL, unit character varying(32) NOT NULL, n integer NOT NULL, p50 double
  precision, "least" double precision, "greatest" double precision, share double precision, module character
  varying(256) DEFAULT ''::character varying NOT NULL, source character varying(256) DEFAULT ''::character varying NOT
  NULL);
CREATE TABLE quota (subject character varying(320) NOT NULL, most integer NOT NULL, set_by character varying(256) NOT
  NULL, set_ms bigint NOT NULL);
CREATE TABLE run (id character varying(64) NOT NULL, command text NOT NULL, user_name text NOT NULL, host text NOT
  NULL, fingerprint_hash character varying(64) NOT NULL, started_ms bigint NOT NULL, finished_ms bigint, exit_code
  integer, priority character varying(16) DEFAULT 'person'::character varying NOT NULL, run_kind character varying(16)
  DEFAULT 'suite'::character varying NOT NULL, run_device_kind character varying(16), run_toolchain character
  varying(256) DEFAULT ''::character varying NOT NULL, run_line character varying(256) DEFAULT ''::character varying
  NOT NULL, run_private boolean DEFAULT false NOT NULL, run_commit character varying(64) DEFAULT ''::character varying
  NOT NULL, run_dirty boolean DEFAULT false NOT NULL, run_source json, run_name character varying(256) DEFAULT
  ''::character varying NOT NULL, run_night character varying(64) DEFAULT ''::character varying NOT NULL, run_began
  boolean DEFAULT true NOT NULL);
CREATE TABLE run_device (run_id character varying(64) NOT NULL, device_id bigint NOT NULL, runtime json);
CREATE TABLE run_job (id bigint NOT NULL, run_id character varying(64) NOT NULL, job_id bigint NOT NULL, case_id
  bigint NOT NULL, "position" integer NOT NULL, build_seconds double precision, cached boolean, bundle_key character
  varying(128), fallback_ops json, operators json, judged_by character varying(64), stale json, decisive_attempt_id
  bigint, decisive_verdict character varying(16), program_hash character varying(64));
CREATE SEQUENCE run_job_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE run_job_id_seq OWNED BY run_job.id;
CREATE TABLE run_order (run_id character varying(64) NOT NULL, user_name character varying(256) NOT NULL, priority
  integer NOT NULL, purpose text NOT NULL, protocol integer NOT NULL, terms text NOT NULL, devices json NOT NULL,
  labels json NOT NULL, classes json NOT NULL, most_devices integer, most_failures integer, failures integer NOT NULL,
  bundles integer NOT NULL, until_ms bigint, state character varying(16) NOT NULL, cancelled_by character varying(256)
  NOT NULL, submitted_ms bigint NOT NULL, ended_ms bigint);
CREATE TABLE series (id bigint NOT NULL, job_id bigint NOT NULL, metric character varying(128) NOT NULL, unit
  character varying(32) NOT NULL, direction character varying(8) NOT NULL, exact boolean NOT NULL);
CREATE SEQUENCE series_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE series_id_seq OWNED BY series.id;
CREATE TABLE shard (id bigint NOT NULL, run_id character varying(64) NOT NULL, soc character varying(64) NOT NULL,
  "position" integer NOT NULL, expected_s double precision NOT NULL, lacking integer NOT NULL, avoid json NOT NULL,
  retry boolean DEFAULT false NOT NULL, state character varying(16) NOT NULL, device character varying(256) NOT NULL,
  fence bigint NOT NULL, agent character varying(256) NOT NULL, token character varying(64) NOT NULL, held_ms bigint
  NOT NULL, tries integer NOT NULL, why text NOT NULL, remaining integer NOT NULL);
CREATE SEQUENCE shard_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE shard_id_seq OWNED BY shard.id;
CREATE TABLE shard_jobs (shard bigint NOT NULL, names text NOT NULL, done text NOT NULL, next_job character
  varying(512) NOT NULL, jobs bytea NOT NULL);
CREATE TABLE shard_weights (user_name character varying(256) NOT NULL, selection character varying(64) NOT NULL,
  asked_ms bigint NOT NULL, seconds json NOT NULL);
CREATE TABLE soc_look (soc character varying(64) NOT NULL, looked_ms bigint NOT NULL);
CREATE TABLE suite_case (id bigint NOT NULL, suite character varying(64) NOT NULL, case_name character varying(64) NOT
  NULL, version character varying(64) NOT NULL, module text NOT NULL);
CREATE SEQUENCE suite_case_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE suite_case_id_seq OWNED BY suite_case.id;
CREATE TABLE triage (id bigint NOT NULL, subject character varying(576) NOT NULL, state character varying(16) NOT
  NULL, user_name character varying(256) NOT NULL, owner character varying(256) NOT NULL, note text NOT NULL, time_ms
  bigint NOT NULL, until_ms bigint);
CREATE SEQUENCE triage_id_seq START WITH 1 INCREMENT BY 1 NO MINVALUE NO MAXVALUE CACHE 1;
ALTER SEQUENCE triage_id_seq OWNED BY triage.id;
CREATE TABLE waiter (id character varying(64) NOT NULL, devices text NOT NULL, wanted integer NOT NULL, user_name
  character varying(256) NOT NULL, host character varying(256) NOT NULL, pid bigint NOT NULL, purpose text NOT NULL,
  priority integer NOT NULL, since_ms bigint NOT NULL, expires_ms bigint NOT NULL);
ALTER TABLE alert ALTER COLUMN id SET DEFAULT nextval('alert_id_seq'::regclass);
ALTER TABLE artifact ALTER COLUMN id SET DEFAULT nextval('artifact_id_seq'::regclass);
ALTER TABLE attempt ALTER COLUMN id SET DEFAULT nextval('attempt_id_seq'::regclass);
ALTER TABLE device ALTER COLUMN id SET DEFAULT nextval('device_id_seq'::regclass);
ALTER TABLE health_event ALTER COLUMN id SET DEFAULT nextval('health_event_id_seq'::regclass);
ALTER TABLE job ALTER COLUMN id SET DEFAULT nextval('job_id_seq'::regclass);
ALTER TABLE run_job ALTER COLUMN id SET DEFAULT nextval('run_job_id_seq'::regclass);
ALTER TABLE series ALTER COLUMN id SET DEFAULT nextval('series_id_seq'::regclass);
ALTER TABLE shard ALTER COLUMN id SET DEFAULT nextval('shard_id_seq'::regclass);
ALTER TABLE suite_case ALTER COLUMN id SET DEFAULT nextval('suite_case_id_seq'::regclass);
ALTER TABLE triage ALTER COLUMN id SET DEFAULT nextval('triage_id_seq'::regclass);
ALTER TABLE farm_schema ADD CONSTRAINT farm_schema_pkc PRIMARY KEY (version_num);
ALTER TABLE agent ADD CONSTRAINT pk_agent PRIMARY KEY (name);
ALTER TABLE agent_device ADD CONSTRAINT pk_agent_device PRIMARY KEY (device);
ALTER TABLE alert ADD CONSTRAINT pk_alert PRIMARY KEY (id);
ALTER TABLE artifact ADD CONSTRAINT pk_artifact PRIMARY KEY (id);
ALTER TABLE attempt ADD CONSTRAINT pk_attempt PRIMARY KEY (id);
ALTER TABLE build ADD CONSTRAINT pk_build PRIMARY KEY (key);
ALTER TABLE build_wanted ADD CONSTRAINT pk_build_wanted PRIMARY KEY (shard, job);
ALTER TABLE comparison ADD CONSTRAINT pk_comparison PRIMARY KEY (attempt_id, "position");
ALTER TABLE counter ADD CONSTRAINT pk_counter PRIMARY KEY (attempt_id, "position");
ALTER TABLE device ADD CONSTRAINT pk_device PRIMARY KEY (id);
ALTER TABLE device_state ADD CONSTRAINT pk_device_state PRIMARY KEY (id);
ALTER TABLE fingerprint ADD CONSTRAINT pk_fingerprint PRIMARY KEY (hash);
ALTER TABLE health_event ADD CONSTRAINT pk_health_event PRIMARY KEY (id);
ALTER TABLE job ADD CONSTRAINT pk_job PRIMARY KEY (id);
ALTER TABLE layer ADD CONSTRAINT pk_layer PRIMARY KEY (attempt_id, "position");
ALTER TABLE lease ADD CONSTRAINT pk_lease PRIMARY KEY (device);
ALTER TABLE measurement ADD CONSTRAINT pk_measurement PRIMARY KEY (attempt_id, "position");
ALTER TABLE night_start ADD CONSTRAINT pk_night_start PRIMARY KEY (name, due_ms);
ALTER TABLE op_profile ADD CONSTRAINT pk_op_profile PRIMARY KEY (attempt_id, "position");
ALTER TABLE quota ADD CONSTRAINT pk_quota PRIMARY KEY (subject);
ALTER TABLE run ADD CONSTRAINT pk_run PRIMARY KEY (id);
ALTER TABLE run_device ADD CONSTRAINT pk_run_device PRIMARY KEY (run_id, device_id);
ALTER TABLE run_job ADD CONSTRAINT pk_run_job PRIMARY KEY (id);
ALTER TABLE run_order ADD CONSTRAINT pk_run_order PRIMARY KEY (run_id);
ALTER TABLE series ADD CONSTRAINT pk_series PRIMARY KEY (id);
ALTER TABLE shard ADD CONSTRAINT pk_shard PRIMARY KEY (id);
ALTER TABLE shard_jobs ADD CONSTRAINT pk_shard_jobs PRIMARY KEY (shard);
ALTER TABLE shard_weights ADD CONSTRAINT pk_shard_weights PRIMARY KEY (user_name, selection);
ALTER TABLE soc_look ADD CONSTRAINT pk_soc_look PRIMARY KEY (soc);
ALTER TABLE suite_case ADD CONSTRAINT pk_suite_case PRIMARY KEY (id);
ALTER TABLE triage ADD CONSTRAINT pk_triage PRIMARY KEY (id);
ALTER TABLE waiter ADD CONSTRAINT pk_waiter PRIMARY KEY (id);
ALTER TABLE alert ADD CONSTRAINT uq_alert_series_id_device_kind_run_id UNIQUE (series_id, device_kind, run_id);
ALTER TABLE artifact ADD CONSTRAINT uq_artifact_attempt_id_kind_sha256 UNIQUE (attempt_id, kind, sha256);
ALTER TABLE attempt ADD CONSTRAINT uq_attempt_run_job_id_digest UNIQUE (run_job_id, digest);
ALTER TABLE device ADD CONSTRAINT uq_device_serial_soc_kind_build UNIQUE (serial, soc, kind, build);
ALTER TABLE job ADD CONSTRAINT uq_job_name UNIQUE (name);
ALTER TABLE run_job ADD CONSTRAINT uq_run_job_run_id_job_id UNIQUE (run_id, job_id);
ALTER TABLE series ADD CONSTRAINT uq_series_job_id_metric_unit_direction_exact UNIQUE (job_id, metric, unit,
  direction, exact);
ALTER TABLE suite_case ADD CONSTRAINT uq_suite_case_suite_case_name_version UNIQUE (suite, case_name, version);
CREATE INDEX ix_agent_device_agent ON agent_device USING btree (agent);
CREATE INDEX ix_agent_device_soc ON agent_device USING btree (soc);
CREATE INDEX ix_alert_run_id ON alert USING btree (run_id);
CREATE INDEX ix_alert_state ON alert USING btree (state);
CREATE INDEX ix_artifact_sha256 ON artifact USING btree (sha256);
CREATE INDEX ix_attempt_device_id ON attempt USING btree (device_id);
CREATE INDEX ix_build_state ON build USING btree (state);
CREATE INDEX ix_build_wanted_key ON build_wanted USING btree (key);
CREATE INDEX ix_build_wanted_run_id ON build_wanted USING btree (run_id);
CREATE INDEX ix_counter_series_id ON counter USING btree (series_id);
CREATE INDEX ix_health_event_device ON health_event USING btree (device);
CREATE INDEX ix_job_case_name ON job USING btree (case_name);
CREATE INDEX ix_lease_token ON lease USING btree (token);
CREATE INDEX ix_measurement_series_id ON measurement USING btree (series_id);
CREATE INDEX ix_run_job_job_id_run_id ON run_job USING btree (job_id, run_id);
CREATE INDEX ix_run_order_state ON run_order USING btree (state);
CREATE INDEX ix_run_started_ms ON run USING btree (started_ms);
CREATE INDEX ix_shard_run_id_state ON shard USING btree (run_id, state);
CREATE INDEX ix_shard_soc_state ON shard USING btree (soc, state, run_id, retry, lacking, "position");
CREATE INDEX ix_shard_token ON shard USING btree (token);
CREATE INDEX ix_triage_subject ON triage USING btree (subject);
CREATE TRIGGER attempt_decides AFTER INSERT ON attempt FOR EACH ROW EXECUTE FUNCTION attempt_decides();
ALTER TABLE agent_device ADD CONSTRAINT fk_agent_device_agent FOREIGN KEY (agent) REFERENCES agent(name);
ALTER TABLE alert ADD CONSTRAINT fk_alert_series_id FOREIGN KEY (series_id) REFERENCES series(id);
ALTER TABLE artifact ADD CONSTRAINT fk_artifact_attempt_id FOREIGN KEY (attempt_id) REFERENCES attempt(id);
ALTER TABLE attempt ADD CONSTRAINT fk_attempt_device_id FOREIGN KEY (device_id) REFERENCES device(id);
ALTER TABLE attempt ADD CONSTRAINT fk_attempt_run_job_id FOREIGN KEY (run_job_id) REFERENCES run_job(id);
ALTER TABLE build_wanted ADD CONSTRAINT fk_build_wanted_shard FOREIGN KEY (shard) REFERENCES shard(id);
ALTER TABLE comparison ADD CONSTRAINT fk_comparison_attempt_id FOREIGN KEY (attempt_id) REFERENCES attempt(id);
ALTER TABLE counter ADD CONSTRAINT fk_counter_attempt_id FOREIGN KEY (attempt_id) REFERENCES attempt(id);
ALTER TABLE counter ADD CONSTRAINT fk_counter_series_id FOREIGN KEY (series_id) REFERENCES series(id);
ALTER TABLE health_event ADD CONSTRAINT fk_health_event_device FOREIGN KEY (device) REFERENCES device_state(id);
ALTER TABLE layer ADD CONSTRAINT fk_layer_attempt_id FOREIGN KEY (attempt_id) REFERENCES attempt(id);
ALTER TABLE measurement ADD CONSTRAINT fk_measurement_attempt_id FOREIGN KEY (attempt_id) REFERENCES attempt(id);
ALTER TABLE measurement ADD CONSTRAINT fk_measurement_series_id FOREIGN KEY (series_id) REFERENCES series(id);
ALTER TABLE op_profile ADD CONSTRAINT fk_op_profile_attempt_id FOREIGN KEY (attempt_id) REFERENCES attempt(id);
ALTER TABLE run_device ADD CONSTRAINT fk_run_device_device_id FOREIGN KEY (device_id) REFERENCES device(id);
ALTER TABLE run_device ADD CONSTRAINT fk_run_device_run_id FOREIGN KEY (run_id) REFERENCES run(id);
ALTER TABLE run ADD CONSTRAINT fk_run_fingerprint_hash FOREIGN KEY (fingerprint_hash) REFERENCES fingerprint(hash);
ALTER TABLE run_job ADD CONSTRAINT fk_run_job_case_id FOREIGN KEY (case_id) REFERENCES suite_case(id);
ALTER TABLE run_job ADD CONSTRAINT fk_run_job_job_id FOREIGN KEY (job_id) REFERENCES job(id);
ALTER TABLE run_job ADD CONSTRAINT fk_run_job_run_id FOREIGN KEY (run_id) REFERENCES run(id);
ALTER TABLE run_order ADD CONSTRAINT fk_run_order_run_id FOREIGN KEY (run_id) REFERENCES run(id);
ALTER TABLE series ADD CONSTRAINT fk_series_job_id FOREIGN KEY (job_id) REFERENCES job(id);
ALTER TABLE shard_jobs ADD CONSTRAINT fk_shard_jobs_shard FOREIGN KEY (shard) REFERENCES shard(id);
ALTER TABLE shard ADD CONSTRAINT fk_shard_run_id FOREIGN KEY (run_id) REFERENCES run_order(run_id);
REVOKE ALL ON FUNCTION attempt_decides() FROM PUBLIC;
INSERT INTO farm_schema VALUES ('0015');
