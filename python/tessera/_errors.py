"""One exception class for each kind of failure, all derived from Error. The core raises these, too."""


class Error(Exception):
    """What every failing call of Tessera raises: a subclass for each kind."""

    code = "error"
    """The kind's stable name, as in logs and JSON."""


class InvalidArgumentError(Error, ValueError):
    """The caller's value is wrong: a shape, a layout, a name, an option."""

    code = "invalid-argument"


class MismatchError(Error):
    """Two ranks or two sides that must agree do not."""

    code = "mismatch"


class NotFoundError(Error, LookupError):
    """A file, tensor, key or batch that is not there."""

    code = "not-found"


class AlreadyExistsError(Error):
    """A key, file or rank that is there already: a duplicate rank, for one."""

    code = "already-exists"


class DeadlineExceededError(Error, TimeoutError):
    """A wait ended at its deadline."""

    code = "deadline-exceeded"


class PeerLostError(Error, ConnectionError):
    """Another process died, is stopped or closed its end."""

    code = "peer-lost"


class CancelledError(Error):
    """Cancelled or interrupted by the user."""

    code = "cancelled"


class DataLossError(Error):
    """A digest or a verification failed."""

    code = "data-loss"


class PermissionDeniedError(Error):
    """Another user's process, file or memory."""

    code = "permission-denied"


class ResourceExhaustedError(Error):
    """Memory, descriptors or disk space have run out."""

    code = "resource-exhausted"


class UnavailableError(Error):
    """The store cannot be reached now."""

    code = "unavailable"


class UnimplementedError(Error, NotImplementedError):
    """A part that this build or machine does not have."""

    code = "unimplemented"


class InternalError(Error):
    """A broken invariant of Tessera: please report it."""

    code = "internal"


for _kind in (Error, *Error.__subclasses__()):
    _kind.__module__ = "tessera"  # where users find it, and pickle too
