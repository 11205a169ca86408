"""Bodies of administration requests."""

from ipaddress import ip_network
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from starlette.requests import Request

from helexa.core.address import base_url
from helexa.core.config import HeaderSecret
from helexa.core.wire.request import to_api_error
from helexa.cortex.access.keys import MAX_SECRET_BYTES
from helexa.cortex.forwarding.request_body_limit_and_workers import read_json_body

_Id = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _network(text: str) -> str:
    """Check that `text` is an IP address or a network, and return it as a network."""
    try:
        return str(ip_network(text))
    except ValueError:
        raise ValueError(f"'{text}' is not a network; write it like 10.1.0.0/16") from None


# Name of a node that joins. The name must be usable as an argument of commands and as a part of URLs.
NodeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]

NetworkText = Annotated[str, StringConstraints(max_length=64), AfterValidator(_network)]

MAX_INVITATION_SECS = 7 * 86400


class AdminRequest(BaseModel):
    """Base class of administration request bodies. Unknown fields are errors."""

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
    """Request to load a model."""

    model: _Id  # a model id or an alias
    node: _Id | None = None  # name of the node to load on. If None, the gateway chooses a node.


class ModelUnloadRequest(AdminRequest):
    """Request to unload a model."""

    model: _Id  # a model id or an alias
    node: _Id | None = None  # name of the node. If None, the model is unloaded from all healthy nodes that have it.


class ModelPullRequest(AdminRequest):
    """Request to download a model to a node."""

    model: _Id  # a source id such as `org/name` or `org/name:Q4_K_M`, or the id of a model in the catalog
    node: _Id | None = None  # name of the node. If None, the gateway chooses a node.
    stream: bool = False  # True for a stream of progress events


class PullCancelRequest(AdminRequest):
    """Request to cancel a download."""

    model: _Id  # name of the model, as in the list of downloads
    node: _Id


class NewInvitation(AdminRequest):
    """Request to create an invitation for one node."""

    name: NodeName | None = None  # name that the node must have. If None, the node chooses its name.
    # networks in which the node's address may be, besides the address from which the node joins
    networks: list[NetworkText] = Field(default_factory=list[str], max_length=16)
    expires_secs: int = Field(default=900, ge=1, le=MAX_INVITATION_SECS)


class NodeJoin(AdminRequest):
    """Request of a node to join."""

    token: str = Field(min_length=1, max_length=100, repr=False)
    name: NodeName
    # base URL under which the gateway reaches the node
    url: Annotated[str, StringConstraints(max_length=300), AfterValidator(base_url)]
    key: Annotated[HeaderSecret, Field(min_length=8, max_length=512)]


class SignIn(AdminRequest):
    """Request to start a session."""

    key: str | None = Field(default=None, min_length=1, max_length=MAX_SECRET_BYTES, repr=False)
    # the token of a sign-in link, instead of `key`
    link: str | None = Field(default=None, min_length=1, max_length=MAX_SECRET_BYTES, repr=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.key is None) == (self.link is None):
            raise ValueError("the request needs either 'key' or 'link'; send exactly one of them")
        return self
