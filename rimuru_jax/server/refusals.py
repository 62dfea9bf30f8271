"""Requests that are answered with an error."""

from fastapi.responses import JSONResponse

from rimuru_jax.server.responses import error_body


class RefusedError(Exception):
    """A request that is answered with an error; the message is for the user."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
    ):
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


def client_gone() -> RefusedError:
    """What nobody will read."""
    return RefusedError(499, "the client went away", "client_closed_request")


def check_model(model: str | None, served: str) -> None:
    """Refuse a model that is not served here."""
    if model is not None and model != served:
        raise RefusedError(
            404, f"model {model!r} is not served here, only {served!r}", "not_found_error", "model"
        )


def error_response(
    status: int, message: str, kind: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(message, kind, status, param), status, headers)
