-- Logins: a role for each host, in a group of farm lab roles. Persons have accounts of farm serve instead.
-- psql farm <logins.sql, then set a password for each role, which psql hashes: \password host_a
CREATE ROLE host_a LOGIN;
CREATE ROLE host_b LOGIN;
GRANT farm_agent TO host_a, host_b;

-- Host that only compiles: farm-build.service.
CREATE ROLE host_c LOGIN;
GRANT farm_builder TO host_c;

-- Login of farm serve, which acts for its accounts.
CREATE ROLE web LOGIN;
GRANT farm_server TO web;

-- Administrator, who upgrades tables, prunes and sets quotas: a member of the owner of the tables.
CREATE ROLE mia LOGIN;
GRANT lab TO mia;

-- Reader, such as a wall screen or a person with queries of their own (psql).
CREATE ROLE wall LOGIN;
GRANT farm_reader TO wall;
