"""Bodies of administration requests: load and unload models, and sign in."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.requests import Request

from helexa.core.wire.request import to_api_error
from helexa.cortex.access.key import MAX_SECRET_BYTES
from helexa.cortex.requests.request import read_json_body

_Id = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class AdminRequest(BaseModel):
    """Base class of the request bodies. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    async def read(cls, request: Request) -> Self:
        """Read and validate the body of `request`.

        Raises:
            ApiError: 400 with the name of an invalid field; 408, 413, 415 or 503 if the body cannot be read.
        """
        try:
            return cls.model_validate_json(await read_json_body(request.receive, request.scope["headers"]))
        except ValidationError as error:
            raise to_api_error(error) from None


class ModelLoadRequest(AdminRequest):
    """Request to load a model.

    Attributes:
        model: a model id or an alias.
        node: name of the node to load on. If None, the gateway chooses a node.
    """

    model: _Id
    node: _Id | None = None


class ModelUnloadRequest(AdminRequest):
    """Request to unload a model.

    Attributes:
        model: a model id or an alias.
        node: name of the node.
    """

    model: _Id
    node: _Id


class SignIn(AdminRequest):
    """Request to start a session.

    Attributes:
        key: the API key to sign in with.
    """

    key: str = Field(min_length=1, max_length=MAX_SECRET_BYTES, repr=False)
