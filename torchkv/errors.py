"""Errors of stores on several machines."""


class RemoteError(RuntimeError):
    """A call failed on another process, or between processes.

    The message names the operation, the rank at fault and the key; of an updater that
    raised, the type and text of its exception.
    """


class WorkerLostError(RemoteError):
    """A process that pushes has ended or is silent."""


class ServerLostError(RemoteError):
    """A process that holds keys has ended or is silent."""


class StoreTimeoutError(RemoteError, TimeoutError):
    """A call took longer than the store's ``timeout``.

    Its outcome is unknown: a push must not be repeated. The message names the ranks
    that were waited for.
    """
