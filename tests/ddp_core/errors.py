"""What calls raise, warn of and log, as text, and how soon."""

import logging
import time
import warnings
from contextlib import contextmanager


def message_of(function, *args, **kwargs):
    """What a call raises."""
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def timed_message_of(function, *args):
    """What a call raises, and after how many seconds."""
    began = time.monotonic()
    return message_of(function, *args), time.monotonic() - began


@contextmanager
def warned(words=""):
    """The texts of the warnings inside that have these words, once it is left."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if words in str(each.message)]


@contextmanager
def logged(words="", name="gradwire", level=logging.NOTSET):
    """The lines of gradwire's log that have these words, as they come."""
    lines, logger, handler = [], logging.getLogger(name), logging.Handler(level)
    handler.emit = lambda record: words in record.getMessage() and lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def shorten(handle, limit, reducer=None):
    """Shorten the time limit of waits from now on: the steps before take as long as a busy machine needs."""
    handle.averager.engines.timeout = limit
    for engine in handle.averager.engines._made.values():
        engine._timeout = engine._beside._timeout = limit
    if reducer is not None:
        reducer._timeout = limit
