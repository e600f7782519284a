"""What a call in another process raises when it has no value."""

from lockstep.errors import RewardError


class CallError(RewardError):
    """A call without a value; `kind` is one of outcome.FAILURE_KINDS."""

    kind: str


class CallTimeout(CallError):
    """The call did not end before its deadline; its process was killed."""

    kind = "timeout"


class CallFailed(CallError):
    """The function raised, or its value cannot be sent back; the message ends with the traceback."""

    kind = "raised"


class CallCrashed(CallError):
    """The process ended during the call."""

    kind = "crashed"
