"""Stores on PostgreSQL over the network: passwords, TLS, and the message for a database without a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from farm_home import FarmHome
from postgresql_server import running_cluster
from receivers import LOOPBACK, make_certificate
from waiting import free_port

from farm.base.config.settings import load_config
from farm.base.config.store_address import shown_address
from farm.base.errors import FIRST_RUN, NoStoreError, StoreError, UsageError
from farm.store.store import open_store

PASSWORD = "s3cret/pass word"
QUOTED = "s3cret%2Fpass%20word"


class Server(NamedTuple):
    """PostgreSQL that requires TLS and a password over the network."""

    port: int
    authority: Path
    """Authority of its certificate."""

    def url(self, database: str = "lab", user: str = "ann", password: str = QUOTED, **options: object) -> str:
        login = f"{user}:{password}" if password else user
        query = "&".join(f"{key}={value}" for key, value in options.items())
        return f"postgresql://{login}@{LOOPBACK}:{self.port}/{database}" + (f"?{query}" if query else "")

    @property
    def verified(self) -> str:
        return self.url(sslmode="verify-full", sslrootcert=self.authority)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    psycopg = pytest.importorskip("psycopg", reason="the driver is not installed")
    certificate = make_certificate(tmp_path_factory.mktemp("tls"))
    port = free_port()
    settings = (f"listen_addresses={LOOPBACK}", f"port={port}", "ssl=on", "ssl_cert_file={folder}/loopback.pem",
                "ssl_key_file={folder}/loopback.pem")  # fmt: skip
    hba = f"local all all trust\nhostssl all all {LOOPBACK}/32 scram-sha-256\n"
    with running_cluster(*settings, hba=hba, files=[certificate]) as folder:
        with psycopg.connect(f"host={folder} port={port} user=farm dbname=postgres", autocommit=True) as connection:
            for name in ("ann", "bob"):
                connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
            connection.execute("CREATE DATABASE lab OWNER ann")
            connection.execute("CREATE DATABASE empty OWNER ann")
        yield Server(port, certificate)


def refusal(url: str, *, readonly: bool = False) -> str:
    """Return the message for an address, after a check that it shows no password."""
    with pytest.raises((StoreError, UsageError)) as caught:
        open_store(url, readonly=readonly)
    text = str(caught.value)
    assert PASSWORD not in text
    assert QUOTED not in text
    assert "\n" not in text
    return text


def test_a_store_over_tls_with_the_server_checked(server: Server, tmp_path: Path) -> None:
    with open_store(server.verified) as store:
        with store._database.reading() as connection:
            query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            assert connection.exec_driver_sql(query).scalar() is True
        assert PASSWORD not in store._database.name
        assert "ann:***@" in store._database.name
    # A reading store connects as well.
    with open_store(server.verified, readonly=True) as store:
        assert store.runs.latest_id() is None
    # Neither a server with another certificate nor one with another name gets the password.
    url = server.url(sslmode="verify-full", sslrootcert=make_certificate(tmp_path))
    for readonly in (False, True):
        assert "certificate verify failed" in refusal(url, readonly=readonly)
        output = refusal(server.verified.replace(LOOPBACK, "localhost"), readonly=readonly)
        assert 'does not match host name "localhost"' in output


def test_passwords_come_from_a_file_and_are_never_shown(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(server.url()).close()
    for name in ("PGPASSWORD", "PGPASSFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    without = server.url(password="")
    for readonly in (False, True):
        assert "$PGPASSFILE" in refusal(without, readonly=readonly)
    passwords = tmp_path / "passwords"
    passwords.write_text(f"{LOOPBACK}:{server.port}:lab:ann:{PASSWORD}\n")
    passwords.chmod(0o600)
    open_store(f"{without}?passfile={passwords}").close()
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    open_store(without, readonly=True).close()
    monkeypatch.delenv("PGPASSFILE")
    wrong = PASSWORD.replace("3", "4")
    output = refusal(server.url(password=wrong.replace("/", "%2F").replace(" ", "%20")))
    assert "password authentication failed" in output
    assert wrong not in output
    assert output.count("password authentication failed") == 1
    # libpq reads the password from the query as well.
    output = refusal(f"{without}?password={wrong.replace(' ', '%20')}")
    assert wrong not in output
    assert "password=***" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sslmode": "verify-ful"}, "unknown sslmode 'verify-ful': did you mean 'verify-full'?"),
        ({"sslmode": "verify-full", "sslrootcert": "/nowhere/ca.pem"}, "sslrootcert: there is no file /nowhere/ca.pem"),
        ({"sslrootcert": "/etc/hostname"}, "sslmode=prefer goes on without it: add sslmode=verify-full"),
        ({"passfile": "/nowhere/pass"}, "passfile: there is no file /nowhere/pass"),
    ],
)
def test_what_is_named_for_tls_is_used_or_refused(options: dict[str, str], message: str) -> None:
    assert message in refusal(Server(1, None).url(**options))  # type: ignore[arg-type]


def test_paths_in_an_address_are_beside_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARM_STORE", raising=False)
    config = tmp_path / "farm.toml"
    config.write_text('store = "postgresql://ann@lab/farm?sslmode=verify-full&sslrootcert=ca.pem&passfile=p"\n')
    assert load_config(config).store_url == (
        f"postgresql://ann@lab/farm?sslmode=verify-full&sslrootcert={tmp_path}/ca.pem&passfile={tmp_path}/p"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_STORE", "postgresql://ann@lab/farm?sslrootcert=system&sslcert=own.pem")
    assert load_config(config).store_url == (f"postgresql://ann@lab/farm?sslrootcert=system&sslcert={tmp_path}/own.pem")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:SECRET@lab:5432/farm", "postgresql://ann:***@lab:5432/farm"),
        ("postgresql://ann:SEC%40RET@lab/farm?sslmode=require", "postgresql://ann:***@lab/farm?sslmode=require"),
        ("postgresql://ann@/farm?host=/run/pg&password=SECRET", "postgresql://ann@/farm?host=/run/pg&password=***"),
        ("postgresql://lab/farm?sslpassword=SECRET", "postgresql://lab/farm?sslpassword=***"),
        ("postgresql://ann:SEC@RET@lab/farm", "postgresql://***"),
        ("postgresql://ann:SEC@RET/SEC@lab:5432/farm", "postgresql://***"),
        ("postgresql://ann:SEC/RET@lab:5432/farm", "postgresql://***"),
        ("sqlite:////data/a:b@c.db", "sqlite:////data/a:b@c.db"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert shown_address(url) == shown


def test_a_password_that_cannot_be_told_from_the_rest_is_refused_and_not_shown(home: FarmHome) -> None:
    for password in ("SEC@RET", "SEC/RET"):
        address = f"postgresql://farm:{password}@{LOOPBACK}:1/farm"
        done = home.farm("status", env={"FARM_STORE": address}, code=2)
        assert "write %40 for @" in done.stderr
        assert not any(part in done.stdout + done.stderr for part in ("SEC", "RET"))


def test_an_empty_database_is_no_store_yet_and_becomes_one(server: Server, home: FarmHome) -> None:
    empty = server.url("empty")
    with pytest.raises(NoStoreError, match=f"there is no store yet: '{FIRST_RUN}' makes one in this database"):
        open_store(empty, readonly=True)
    done = home.farm("status", env={"FARM_STORE": empty})
    assert (done.returncode, "no store yet" in done.stderr, "older farm" in done.stderr) == (9, True, False)
    assert QUOTED not in done.stderr
    # A user without rights in the database may make no tables in it.
    assert "ALTER DATABASE ... OWNER TO this user" in refusal(server.url("empty", user="bob"))
    open_store(empty).close()
    with open_store(empty, readonly=True) as store:
        assert store.runs.latest_id() is None
