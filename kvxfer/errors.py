"""Every exception that kvxfer raises.

Classes exist where a caller decides differently; each message names the value, the limit and the
remedy. The native core looks these names up when it is imported, so C++ and Python share one table.
"""


class KvxferError(Exception):
    """Base of all. ``code`` is an errno or a CUDA status where one exists, else 0."""

    def __init__(self, message: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class InvalidUsage(KvxferError, ValueError):
    """An argument is wrong: nothing was started, nothing was written."""


class LayoutMismatch(InvalidUsage):
    """Two layouts cannot be joined; the message names the field and both values."""


class RegistrationError(KvxferError):
    """Memory cannot be registered, or a registration no longer stands for live memory."""


class NotAvailable(KvxferError):
    """This machine, build or permission does not offer what was asked for."""


class CudaError(KvxferError):
    """A CUDA call failed; ``code`` is its status."""


class SystemCallError(KvxferError):
    """A system call failed; ``code`` is its errno."""


class TransferFailed(KvxferError):
    """A transfer ended without delivering its bytes."""


class TransferTimeout(KvxferError, TimeoutError):
    """A transfer was not complete at its deadline; its pages may still be written."""


class ControlTimeout(KvxferError, TimeoutError):
    """A peer did not answer on a control channel within the deadline."""


class PeerLost(KvxferError):
    """The peer is gone, or is another incarnation than the one that was met."""


class ProtocolMismatch(KvxferError):
    """The peer speaks another protocol version, or sent what the protocol does not allow."""


class ProfileRefused(KvxferError):
    """A tuning profile is damaged, of another version, or of another machine."""


class VerificationError(KvxferError):
    """Bytes at the destination differ from the source, or a figure is physically impossible."""
