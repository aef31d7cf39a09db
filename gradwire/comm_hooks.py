"""Communication hooks by name: `ddp_model.register_comm_hook(None, gradwire.comm_hooks.int8)`.

Every compressor has one, with its defaults and with `_` for `-`: `bf16`, `int8`, `int4`, `powersgd`, `batched_powersgd`.
`gradwire.comm_hook("powersgd:rank=8")` makes a hook with options.

>>> from gradwire import comm_hooks
>>> comm_hooks.int8
<gradwire's hook: int8>
"""

from .compress import compressors
from .hooks.comm_hook import CommHook


def __getattr__(name: str) -> CommHook:
    """Make the hook of a compressor when it is first asked for."""
    known = __dir__()
    if name not in known:
        raise AttributeError(f"module {__name__!r} has no hook {name!r}; it has: {', '.join(known)}")
    globals()[name] = hook = CommHook(name.replace("_", "-"), {}, f"comm_hooks.{name}")
    return hook


def __dir__() -> list[str]:
    """Return the names of all hooks."""
    return sorted(name.replace("-", "_") for name in compressors())
