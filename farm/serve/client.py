"""Readers of the everyday commands: the store of this machine, and the API of a server for a laptop without it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
from msgspec.json import Decoder

from farm.base.errors import InfraError, UsageError
from farm.base.text import one_line
from farm.serve.page import Facts, Page

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.base.config.settings import Config
    from farm.dispatch.pool.inventory import DeviceRow
    from farm.policy.situation import Waiting
    from farm.serve.actions import Done
    from farm.store.accounts import Account
    from farm.store.artifacts import ArtifactStore
    from farm.store.records import RunView
    from farm.store.store import Store

    # Reader of an everyday command, which does not know where the facts come from.
    Reader: TypeAlias = "StoreReader | Server"

Query = TypeVar("Query", bound=msgspec.Struct)
Found = TypeVar("Found", bound=Facts)
Answer = TypeVar("Answer", bound=msgspec.Struct)


class StoreReader:
    """Reader of the store, and of the devices that are attached to this machine."""

    def __init__(self, config: Config, store: Store) -> None:
        self._config, self._store = config, store

    @property
    def artifacts(self) -> ArtifactStore:
        """Files of attempts."""
        from farm.store.artifacts import open_artifacts

        return open_artifacts(self._config)

    def read(self, make: Callable[[Store, Query], Found], query: Query) -> Found:
        """Return the facts of a page."""
        return make(self._store, query)

    def devices(self) -> tuple[list[DeviceRow], list[Waiting]]:
        """Ask every attached device for its state; return attached and absent known devices."""
        from farm.base.processes import Supervisor
        from farm.dispatch.pool.inventory import take_inventory

        with Supervisor() as supervisor:
            return take_inventory(self._config, self._store, supervisor), self._store.leases.waiting()


# Client of a server's API: facts of pages and actions, for a laptop without the store.


_VARIABLE, _TOKEN = "FARM_SERVER", "FARM_TOKEN"
_TIMEOUT_S = 60.0
# Field of a query in the path of a page.
_FIELD = re.compile(r"{(\w+):\w+}")
_PRINTABLE = re.compile(r"[!-~]*")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Server:
    """Server that reads its store and acts for the account of a token; read as `StoreReader`.

    Raises UsageError for an address or a token that is none.
    """

    def __init__(self, url: str, token: str) -> None:
        parts = _parts_of(url)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise UsageError(
                f"${_VARIABLE} is no address of a server: expected https://HOST, or http:// on this machine"
            )
        if not _PRINTABLE.fullmatch(token):
            raise UsageError(f"${_TOKEN} is no token: expected printable ASCII without blanks and line ends")
        self._url, self._token = url.rstrip("/"), token

    @property
    def artifacts(self) -> None:
        """None: the page of a job on the server has the files of its attempts."""

    def devices(self) -> tuple[list[DeviceRow], list[Waiting]]:
        """Return the devices in the store of the server; nothing is scanned."""
        from farm.serve.pages.devices import DevicesQuery, devices_page

        facts = self.read(devices_page, DevicesQuery())
        return facts.devices, facts.waiting

    def read(self, make: Callable[[Store, Query], Found], query: Query) -> Found:
        """Return the facts of a page. Raises UsageError and InfraError with the answer of the server."""
        page = Page(make)
        path = _FIELD.sub(lambda field: quote(str(getattr(query, field[1])), safe=""), page.path)
        in_path = _FIELD.findall(page.path)
        asked = {
            field.name: str(value)
            for field in msgspec.structs.fields(page.query)
            if (value := getattr(query, field.name)) != field.default and field.name not in in_path
        }
        return cast("Found", self._parsed(Decoder(page.facts).decode, "GET", self._api(path), params=asked))

    def act(self, action: str, **asked: Any) -> Done:
        """Perform an action. Raises UsageError and InfraError with the answer of the server."""
        from farm.serve.actions import Done

        return self._parsed(Decoder(Done).decode, "POST", self._api(f"/actions/{action}"), json=asked)

    def account(self) -> Account:
        """Return the account of the token; its name is empty on a server without accounts. Raises as `read`."""
        from farm.store.accounts import Account

        return self._parsed(Decoder(Account).decode, "GET", self._api("/me"))

    def report(self, run_id: str) -> bytes:
        """Return the report of a run, in one page. Raises as `read`."""
        return self._ask("GET", self.address_of(run_id), accept="text/html")

    def run(self, run_id: str) -> RunView:
        """Return a run. Raises as `read`."""
        from farm.report.formats.run_json import parse_json

        return self._parsed(parse_json, "GET", self.address_of(run_id))

    def address_of(self, run_id: str) -> str:
        """Return the address of the report of a run."""
        return f"{self._url}/runs/{quote(run_id, safe='')}/report"

    def _parsed(self, parse: Callable[[bytes], Answer], method: str, address: str, **more: Any) -> Answer:
        content = self._ask(method, address, **more)
        try:
            return parse(content)
        except msgspec.DecodeError:
            problem = "no answer of this version of farm: look for a proxy between, and compare both versions"
            raise InfraError(f"{self._url}: {problem}") from None

    def _api(self, path: str) -> str:
        return f"{self._url}/api/v1{path.rstrip('/')}"

    def _ask(self, method: str, address: str, accept: str = "application/json", **more: Any) -> bytes:
        import httpx

        # A proxy of the environment would get the token of an http address in the clear.
        trusts_environment = self._url.casefold().startswith("https:")
        headers = {"Accept": accept, **({"Authorization": f"Bearer {self._token}"} if self._token else {})}
        try:
            answer = httpx.request(
                method, address, headers=headers, timeout=_TIMEOUT_S, trust_env=trusts_environment, **more
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise InfraError(f"{self._url} does not answer: {one_line(str(error), 200)}") from None
        if answer.is_success:
            return answer.content
        problem = _problem_of(answer.content)
        if answer.status_code == 401:
            raise UsageError(f"{self._url}: {problem}: ${_TOKEN} names the token of your account")
        if answer.status_code < 500:
            raise UsageError(f"{self._url}: {problem}")
        raise InfraError(f"{self._url} answers {answer.status_code}: {problem}")


def _parts_of(url: str) -> SplitResult:
    """Return the parts of a server's address. Raises UsageError without the address, which may have a password."""
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or not _PRINTABLE.fullmatch(url) or "@" in url or parts.query or parts.fragment:
        raise UsageError(f"${_VARIABLE} is no address of a server: expected https://HOST, without account and query")
    return parts


def _problem_of(content: bytes) -> str:
    try:
        return one_line(str(msgspec.json.decode(content, type=dict[str, Any]).get("error", "")), 1000) or "no reason"
    except msgspec.DecodeError:
        return "no answer of farm"
