"""Every error inkcap raises on purpose. A message names the thing, its value, the limit and the way out.

InkcapError
├── BadRequest 400           the caller's fault; `param` names the field
│   ├── ContextTooLong
│   ├── MediaRefused
│   ├── NotBuiltYet          a feature this version names but does not have
│   ├── UnknownModel 404
│   └── UnknownAdapter 404
├── Overloaded 503           the caller may try again after `retry_after` seconds
│   ├── QueueFull 429
│   └── Draining
├── SetupError               found at start, before anything is served
│   ├── ConfigInvalid
│   ├── ModelNotFound
│   ├── CheckpointUnreadable   a file is missing, truncated or corrupt
│   ├── CheckpointMismatch     files are readable but do not fit the configuration
│   ├── NotEnoughMemory
│   └── NoSuchOp
└── EngineFault 503          the engine process died, or a bug of ours stopped a step
"""


class InkcapError(Exception):
    """Root of the tree. `status` is the HTTP status the server answers with."""

    status = 500


class BadRequest(InkcapError):
    """The request cannot be served as it is; `param` is the field to change, when there is one."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(BadRequest):
    """Prompt, or prompt plus requested tokens, exceed the model's context."""


class MediaRefused(BadRequest):
    """An image or audio part that cannot be fetched, decoded or allowed."""


class NotBuiltYet(BadRequest):
    """A feature that exists in the API but not in this version; the message names it."""


class UnknownModel(BadRequest):
    """The request names a model this server does not serve."""

    status = 404


class UnknownAdapter(BadRequest):
    """The request names an adapter this server has not loaded."""

    status = 404


class Overloaded(InkcapError):
    """The server is able but busy; `retry_after` is in seconds."""

    status = 503

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Overloaded):
    """The bounded waiting queue is full."""

    status = 429


class Draining(Overloaded):
    """The server is shutting down and takes no new requests."""


class SetupError(InkcapError):
    """Something is wrong before the first request can be served."""


class ConfigInvalid(SetupError):
    """An option has a value it cannot have, or is unknown."""


class ModelNotFound(SetupError):
    """No checkpoint at the given place; the message lists every place searched."""


class CheckpointUnreadable(SetupError):
    """A checkpoint file is missing, truncated or corrupt."""


class CheckpointMismatch(SetupError):
    """Tensors or configuration of a checkpoint do not fit each other or this engine."""


class NotEnoughMemory(SetupError):
    """The memory budget cannot hold the model, its cache or one step."""


class NoSuchOp(SetupError):
    """No implementation of an op fits the device, or the named one does not exist."""


class EngineFault(InkcapError):
    """The engine stopped: its process died or a step failed."""

    status = 503
