"""Ranks that share a card: each is another host to NCCL, which then takes sockets, and refuses no GPU twice."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from gradwire.experiments.ranks.stopping import killed_with

from ..parts import ROOT
from .world import LIMIT, UNNOTICED

STUCK, FIRST = 240, 60  # seconds of a check without a line, and more of them for the first one
SOON = 8  # seconds in which ranks end behind one that has ended
OVER = 20  # seconds beyond the groups' limit, in which ranks end behind one that a check has ended
GIGABIT = 125_000_000  # bytes
NCCL = {  # one ring over loopback's sockets; little of the GPU for each rank
    "SOCKET_IFNAME": "lo", "SOCKET_FAMILY": "AF_INET", "IB_DISABLE": "1", "NET": "Socket", "NET_PLUGIN": "none",
    "P2P_DISABLE": "1", "SHM_DISABLE": "1", "NVLS_ENABLE": "0", "MNNVL_ENABLE": "0", "RAS_ENABLE": "0",
    "CUMEM_ENABLE": "0", "CUMEM_HOST_ENABLE": "0", "GIN_ENABLE": "0", "ALGO": "Ring", "PROTO": "Simple",
    "MAX_CTAS": "2", "MAX_NCHANNELS": "2", "MIN_NCHANNELS": "1", "MAX_P2P_NCHANNELS": "1", "MIN_P2P_NCHANNELS": "1",
    "NCHANNELS_PER_NET_PEER": "1", "SOCKET_NTHREADS": "1", "NSOCKS_PERTHREAD": "1", "BUFFSIZE": str(1 << 20),
    "DEBUG": "WARN",
}  # fmt: skip
TORCH = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    "GRADWIRE_SHARED_MEMORY": "0",
}  # fmt: skip


def environment(rank, ranks, port, pace, library):
    """Return a rank's variables; `pace`: Gbit/s of each of its sockets, 0 for an open link."""
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    nccl = {**NCCL, "HOSTID": f"rank-{rank}"} | ({"MAX_NCHANNELS": "1", "MAX_CTAS": "1"} if pace else {})
    given = {**os.environ, **TORCH, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    given |= {f"NCCL_{name}": value for name, value in nccl.items()}
    given["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return given | ({"LD_PRELOAD": str(library), "PACE_BYTES": str(int(pace * GIGABIT))} if pace else {})


def pacer(folder):
    """Compile what paces sockets, once. Raises FileNotFoundError where there is no C compiler."""
    library, source = folder / "pace.so", Path(__file__).with_name("pace.c")
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True, timeout=60)
    return library


class Start:
    """All ranks of one start, and what has become of them."""

    def __init__(self, folder, label, ranks, command, pace):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.rows = folder / f"{label}.jsonl"
        self.rows.write_text("")
        self.logs = [folder / f"{label}-rank{rank}.log" for rank in range(ranks)]
        self.ended = {}  # by rank, when
        self._began, library = time.monotonic(), pacer(folder) if pace else None
        self._processes = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as out:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", f"{__package__}.world", command[0], str(self.rows), *command[1:]],
                        cwd=ROOT, env=environment(rank, ranks, port, pace, library),
                        stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                        preexec_fn=killed_with(os.getpid()),
                    )
                )  # fmt: skip

    def watch(self, deadline, table):
        """Wait until all ranks have ended, and end them where they are stuck, or at the deadline."""
        while len(self.ended) < len(self._processes):
            time.sleep(0.05)
            now = time.monotonic()
            gone = [rank for rank, each in enumerate(self._processes) if each.poll() is not None]
            self.ended |= {rank: now for rank in gone if rank not in self.ended}
            if now > deadline or self._stuck(now, table):
                self.kill()

    def _stuck(self, now, table):
        """Return True for ranks that write nothing for long, or stay behind one that has failed."""
        written, begun = self.lines()
        current = next((name for name in begun if name not in written), None)
        patience = LIMIT.total_seconds() + OVER if current and table[current].ends else SOON
        failed = [when for rank, when in self.ended.items() if self._processes[rank].returncode]
        silent = time.time() - self.rows.stat().st_mtime > STUCK + FIRST * (not begun)
        return silent or bool(failed and now - min(failed) > patience)

    def kill(self):
        """End what is left of all ranks."""
        for each in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()

    @property
    def codes(self):
        """The exit code of each rank; None for one that runs."""
        return [each.poll() for each in self._processes]

    def lines(self):
        """Return the rows by check, and the checks that have begun."""
        rows = [json.loads(line) for line in self.rows.read_text().splitlines()]
        return {row["check"]: row for row in rows if "check" in row}, [row["begun"] for row in rows if "begun" in row]

    def fate(self, name, one):
        """Return the row of a check that has ended the ranks; it is well if it was to, and those behind were soon."""
        first = min(self.ended.values())
        behind = {rank: round(when - first, 1) for rank, when in sorted(self.ended.items())}
        soon = max(behind.values()) < LIMIT.total_seconds() + OVER
        ok = one.ends and soon and UNNOTICED not in self.codes
        told = {
            "exit codes": self.codes,
            "seconds behind the first": behind,
            "rank 0": self.logs[0].read_text()[-1500:],
        }
        return {"check": name, "ok": ok, "told": told}


def played(folder, label, file, ranks, table, deadline, *, cpu, pace=0.0):
    """Yield the row of each check of a table, on ranks that start anew behind one that fails or ends them."""
    left, turn = list(table), 0
    while left and time.monotonic() < deadline:
        start = Start(folder, f"{label}-{turn}", ranks, [file, "cpu" if cpu else "cuda", *left], pace)
        try:
            start.watch(deadline, table)
        finally:
            start.kill()
        rows, begun = start.lines()
        for name in begun:
            if name in rows or time.monotonic() < deadline:
                yield rows.get(name) or start.fate(name, table[name])
        if not begun and "EADDRINUSE" not in tail(start.logs[0]):  # the port was another program's: again
            yield {"check": "start", "ok": False, "told": {"exit codes": start.codes, "rank 0": tail(start.logs[0])}}
            return
        left, turn = [name for name in left if name not in begun], turn + 1


def tail(log):
    """Return the end of a rank's log."""
    return log.read_text(errors="replace")[-1500:]


VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextmanager
def side_by_side(wanted):
    """Inside the `with` kernels of several processes run at once, by MPS; False where they take turns."""
    control = shutil.which("nvidia-cuda-mps-control") if wanted else None
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # short: it holds sockets
        works = control is not None and _mps(control, folder)
        try:
            yield works
        finally:
            if works:
                _end_mps(control)


def _mps(control, folder):
    """Start MPS for processes that are started from now on. Return False where it does not work."""
    os.environ |= dict.fromkeys(VARIABLES, folder)
    code = "import torch; torch.ones(9, device='cuda').sum().item()"
    commands = [control, "-d"], [sys.executable, "-c", code]
    if all(subprocess.run(each, check=False, timeout=60).returncode == 0 for each in commands):
        return True
    _end_mps(control)
    return False


def _end_mps(control):
    subprocess.run([control], input="quit\n", text=True, check=False, timeout=30)
    for name in VARIABLES:
        del os.environ[name]
