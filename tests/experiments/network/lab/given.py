import time

PATIENCE = 60


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return result


def alive(process):
    """Whether a process runs, and is no zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def shell(text):
    return ["sh", "-c", text]
