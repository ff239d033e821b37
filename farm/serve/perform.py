"""Routes of the actions: checks of the role, the record of each action, forms and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from litestar import Request, Response, get, post
from litestar.enums import RequestEncodingType
from litestar.exceptions import PermissionDeniedException, ValidationException
from litestar.params import Body

from farm.base.errors import FarmError
from farm.serve.actions import ACTIONS, Action, Context, Done
from farm.serve.render import PROBLEMS, Renderer, json_answer
from farm.serve.security import local_path
from farm.serve.stores import StoreHolder
from farm.store.accounts import Role

if TYPE_CHECKING:
    from litestar.handlers import HTTPRouteHandler

    from farm.base.config.settings import Config
    from farm.serve.access import User


class Me(msgspec.Struct, frozen=True):
    """User of a request."""

    name: str
    role: Role
    schema: int = 1


@get("/me", sync_to_thread=False, responses=PROBLEMS)
def me(request: Request[Any, Any, Any]) -> Response[Me]:
    """Return the user of the token."""
    user: User = request.scope["user"]
    return Response(Me(user.name, user.role))


class Actions:
    """Actions of this server."""

    def __init__(self, config: Config, renderer: Renderer) -> None:
        self._config, self._renderer = config, renderer
        # Opened with the first action: a server without accounts only reads.
        self._stores = StoreHolder(config.store_url, readonly=False)

    def api(self) -> list[HTTPRouteHandler]:
        """Return the routes that take and return JSON."""
        return [self._api(action) for action in ACTIONS]

    def forms(self) -> list[HTTPRouteHandler]:
        """Return the routes of forms, which lead back to the page with the form."""
        return [self._form(action) for action in ACTIONS]

    def _api(self, action: Action) -> HTTPRouteHandler:
        def answer(request: Request[Any, Any, Any], data: Any) -> Response[bytes]:
            return json_answer(self._perform(request, action, data))

        return _route(f"/actions/{action.name}", answer, action, Annotated[action.asked, Body()], Response[Done])

    def _form(self, action: Action) -> HTTPRouteHandler:
        def answer(request: Request[Any, Any, Any], data: Any) -> Response[Any]:
            request.state["back"] = path = local_path(str(data.get("next", "")))
            fields = {name: value for name, value in data.items() if value != ""}
            try:
                asked = msgspec.convert(fields, action.asked, strict=False)
            except msgspec.ValidationError as error:
                raise ValidationException(str(error)) from error
            done = self._perform(request, action, asked)
            values = {"title": action.name, "done": done, "next": path}
            return self._renderer.html(request, "done.html.j2", 200, **values)

        body = Annotated[dict[str, str], Body(media_type=RequestEncodingType.URL_ENCODED)]
        return _route(f"/actions/{action.name}", answer, action, body, Response[bytes])

    def _perform(self, request: Request[Any, Any, Any], action: Action, asked: msgspec.Struct) -> Done:
        """Perform an action and record it, also where it is refused."""
        user: User = request.scope["user"]
        if not user.name:
            raise PermissionDeniedException("nothing can be changed without accounts: 'farm lab accounts' makes them")
        fields = msgspec.structs.asdict(asked)
        shown = {name: len(value) if isinstance(value, bytes) else value for name, value in fields.items()}
        facts = (user.name, action.name, msgspec.json.encode(shown).decode())
        with self._stores.opened() as store:
            if not user.may(action.role):
                store.accounts.record(*facts, f"refused: needs the role {action.role}")
                problem = f"{action.name} needs the role {action.role}, this account is {user.role}"
                raise PermissionDeniedException(problem)
            # An action that hangs, or whose server is killed, has this entry.
            begin_id, outcome = store.accounts.record(*facts), "done"
            try:
                return action.perform(Context(self._config, store, user.name, user.role), asked)
            except BaseException as error:
                outcome = f"refused: {error}" if isinstance(error, FarmError) else f"failed: {type(error).__name__}"
                raise
            finally:
                store.accounts.record(*facts, outcome, begin_id)


def _route(path: str, answer: Any, action: Action, body: Any, returned: Any) -> HTTPRouteHandler:
    answer.__annotations__ = {"request": Request, "data": body, "return": returned}
    answer.__name__, answer.__doc__ = action.perform.__name__, action.perform.__doc__
    return post(
        path, sync_to_thread=True, status_code=200, responses=PROBLEMS, request_max_body_size=action.most_bytes
    )(answer)
