"""Every error a user can cause: one tree, each message saying what was wrong and what to do.

Asserts are for invariants of the engine; anything a caller, a file or a flag can trigger is raised from here,
so that the command line turns it into one line with exit status 2 and a server into a 4xx.
"""


class PacelineError(Exception):
    """Base of all errors Paceline raises on purpose; ``str(error)`` is one line fit to show a user."""


class InvalidParameterError(PacelineError, ValueError):
    """A sampling, speculation or engine parameter is outside its range."""


class GrammarError(InvalidParameterError):
    """The JSON schema, regular expression or grammar of a structured output cannot be used."""


class InvalidPromptError(PacelineError, ValueError):
    """The prompt is empty, or its messages are malformed."""


class ContextLengthError(InvalidPromptError):
    """The prompt leaves no room for a single generated token within the context length."""


class CacheCapacityError(PacelineError):
    """The KV cache is too small for the request (or for the configured context) even when otherwise empty."""


class ModelNotFoundError(PacelineError):
    """The name is neither in the catalog, nor a file or folder, nor a reachable hub id."""


class ModelFormatError(PacelineError):
    """A checkpoint was found but cannot be used: truncated, unsupported, or with a wrong tensor."""


class ChecksumError(PacelineError):
    """A downloaded file is not the one that was asked for."""


class DraftMismatchError(PacelineError):
    """The draft model does not share the target's vocabulary."""


class ChatTemplateError(InvalidPromptError):
    """The model's chat template is absent, or rejects the messages."""


class BackendUnavailableError(PacelineError):
    """The requested backend, device or dtype cannot serve on this machine."""


class ServerError(PacelineError):
    """A server that was to be talked to does not answer, or refuses."""


class BenchmarkError(PacelineError):
    """A benchmark cannot run as asked: an unknown suite, unreadable questions, a history with too little in it."""


class TrainingError(PacelineError):
    """A draft cannot be trained as asked: no data, a folder of another recipe, a repository that cannot be read."""
