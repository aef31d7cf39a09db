"""What calls raise, as text."""


def message_of(function, *args, **kwargs):
    """What a call raises."""
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
