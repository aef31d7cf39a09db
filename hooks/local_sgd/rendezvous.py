"""Sites that come and go: before each round they meet in a store that outlives them, and go on with those that came.

The store has a numbered meeting for each round. A site adds its name to the next one; the last that is expected closes it,
or the first whose patience ends, by writing who is there. Where these share a process group already they keep it.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...ddp_core.averaging.same_kernels import follow_kernels, kernel_offer
from ...kernels.dispatch import requested_backends
from .sites import CPU, Meeting

logger = logging.getLogger(__name__)
ATTEMPTS = 5  # to connect
PHASES = 3  # of a round's limit: waiting for others, the round itself, meeting again without those that it lost
POLL = 0.02  # seconds between two reads of the store
LOOKS = 4  # at least, before others are late: while this site is stopped nobody is
CONNECT = timedelta(seconds=60)  # limit of a look into the store
SEARCH = 20.0  # seconds in which a store may still come up
PAUSE = 0.5  # seconds between two attempts to reach it
OPEN_END = timedelta(days=365)
KEPT = 2  # meetings of which the store has a record: whoever comes to one compares it with the one before
ABSENT = "-"  # no key has this value


class TrainingEnded(RuntimeError):
    """The other sites have ended the training, after `round`."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.round = number


class Rendezvous:
    """The meeting point of sites: a TCP store at `address` ("host:port"), such as `gradwire rendezvous` keeps.

    `sites`: how many are waited for at the very start. `name`: this one's, for messages. `limit`: of a round; a site that
    is later is left out, and comes back with what the others have by then. `start`: limit of the wait at the start.
    `prefix` tells trainings apart that share a store. Raises ValueError for an address that is none and RuntimeError where
    no store answers.
    """

    def __init__(
        self,
        address: str,
        sites: int,
        *,
        name: str | None = None,
        limit: timedelta = timedelta(minutes=3),
        start: timedelta = timedelta(minutes=30),
        prefix: str = "training",
    ) -> None:
        host, port = _host_and_port(address)
        if sites < 1 or limit.total_seconds() <= 0:
            raise ValueError(f"sites is at least 1 and limit above 0; got {sites} and {limit}")
        self.patience = 10 * limit.total_seconds() + start.total_seconds()  # after which a round has failed for sure
        self._address, self._sites, self._start, self._phase = address, sites, start, limit / PHASES
        self._id = uuid.uuid4().hex[:12]
        self._name = name or f"site {self._id}"
        self._store = dist.PrefixStore(f"gradwire/{prefix}", _connected(host, port, address))
        self._number = 0  # of the last meeting that this site knows to be over
        self._met = 0  # number of the last meeting that this site was in, in this training
        self._expected: set[str] = set()
        self._meeting: Meeting | None = None
        self._group_name = ""
        self._setup = ""
        self._kernels: dict[str, Any] = {}  # what this site offers to run operations on
        self._closed = threading.Event()

    def join(self, setup: str, operations: Collection[str] = ()) -> None:
        """Remember how this site is set up; the first meeting compares.

        `operations`: of kernels, which run on the same backend at all sites of a meeting.
        """
        requested = ", ".join(requested_backends()) if operations else ""
        self._setup, self._met = setup + (f", kernels on {requested}" if requested else ""), 0
        self._kernels = kernel_offer(operations, CPU)
        self._closed.clear()  # by a training before this one

    def meet(self) -> Meeting:
        """Come to the next meeting, and connect with those that did. Raises RuntimeError where that fails repeatedly."""
        for attempt in range(ATTEMPTS):
            record = self._closed_meeting()
            arrivals = record["arrivals"]
            names = [arrival["name"] for arrival in arrivals]
            if lost := self._expected - _ids(record):
                logger.warning("round %d goes on without %d sites: with %s", self._number, len(lost), ", ".join(names))
            self._expected = _ids(record)
            try:
                return self._connect(arrivals)
            except RuntimeError as error:  # one has died since
                self.break_up(error)
                if attempt == ATTEMPTS - 1:
                    raise RuntimeError(
                        f"{', '.join(names)} reach the rendezvous at {self._address}, but not each other: open the ports "
                        f"between them, or name the interface in GLOO_SOCKET_IFNAME. {error}"
                    ) from error
        raise AssertionError("unreachable")

    def _connect(self, arrivals: list[dict[str, Any]]) -> Meeting:
        held = {arrival["group"] for arrival in arrivals}
        kept = self._meeting
        if kept is not None and held == {self._group_name} and kept.ranks.world_size == len(arrivals):
            return kept
        rank = next(place for place, arrival in enumerate(arrivals) if arrival["id"] == self._id)
        self._meeting, self._group_name = None, ""
        store = dist.PrefixStore(f"group/{self._number}", self._store)
        group = dist.ProcessGroup(store, rank, len(arrivals))
        backend = dist.ProcessGroupGloo(store, rank, len(arrivals), self._phase)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        follow_kernels([arrival["kernels"] for arrival in arrivals], rank, CPU)
        self._meeting, self._group_name = Meeting(group, self._phase), str(self._number)
        return self._meeting

    def break_up(self, error: Exception) -> None:
        """Drop the connection; the next meeting finds out who is left."""
        logger.warning("a round failed, and is done again with those that are left: %s", error)
        self._meeting, self._group_name = None, ""

    def end(self, number: int) -> None:
        """Have the store remember that the training has ended after round `number`: a site that comes later raises."""
        try:
            self._store.set("ended", json.dumps({"meeting": self._met, "round": number}))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            logger.warning(
                "the rendezvous at %s has gone, so that a late site cannot see that training has ended: %s",
                self._address,
                error,
            )

    def close(self) -> None:
        """Let go of the connection; a thread that waits here for other sites raises RuntimeError."""
        self._closed.set()
        self._meeting, self._group_name = None, ""

    def _closed_meeting(self) -> Mapping[str, Any]:
        """The record of the first meeting that this site got into."""
        try:
            while True:
                number = max(self._number, self._latest()) + 1
                record = self._attend(number)
                if record is not None:
                    self._number = self._met = number
                    return record
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise RuntimeError(
                f"the rendezvous at {self._address} has gone; start it again, then all sites from their checkpoints. {error}"
            ) from error

    def _latest(self) -> int:
        return int(self._read("latest") or 0)

    def _read(self, key: str) -> str:
        """Return a key's value, empty where there is none, in one look: another site may delete the key between two."""
        value = self._store.compare_set(key, ABSENT, ABSENT).decode()
        return "" if value == ABSENT else value

    def _attend(self, number: int) -> Mapping[str, Any] | None:
        """Come to a meeting: its record, or None where it was closed without this site."""
        if not self._is_over(number):
            mine: dict[str, Any] = {"id": self._id, "name": self._name, "setup": self._setup, "group": self._group_name}
            mine["kernels"] = self._kernels
            place = self._store.add(f"{number}/count", 1)
            self._store.set(f"{number}/arrival/{place}", json.dumps(mine))
            try:
                self._await_end(number)
            except BaseException:
                self._store.delete_key(f"{number}/arrival/{place}")  # nobody is to count on this one
                raise
        record = self._record(number)
        if not record:  # so long ago that nothing is left of it
            self._forget(number)
            return None
        if record["setup"] != self._setup:
            raise ValueError(
                f"the sites were set up differently: the others have {record['setup']}, here {self._setup}"
            )
        if self._id not in _ids(record):
            self._number = number  # too late for this one
            return None
        return record

    def _await_end(self, number: int) -> None:
        """Wait until a meeting is closed, by others or here."""
        last, awake = time.monotonic(), 0.0
        while True:
            ended = json.loads(self._read("ended") or "{}")
            before = {} if ended.get("meeting", 0) >= number - 1 else self._record(number - 1)
            here, now = self._arrivals(number), time.monotonic()
            awake, last = awake + min(now - last, self._phase.total_seconds() / LOOKS), now
            if self._is_over(number):  # looked at last: what a site has seen before it was stopped may be over
                return
            if self._closed.is_set():
                raise RuntimeError(f"{self._name} gave up waiting for other sites at {self._address}: it was closed")
            if 0 < self._met <= ended.get("meeting", 0):
                raise TrainingEnded(
                    f"the training at {self._address} has ended, and {self._name} has missed its end: take the model of "
                    "another site, or start all sites from their checkpoints to go on",
                    ended["round"],
                )
            self._close_if_due(number, before, here, awake)
            time.sleep(POLL)

    def _close_if_due(self, number: int, before: dict[str, Any], here: list[dict[str, str]], passed: float) -> None:
        """Close a meeting where all have come, or after `passed` seconds of patience. RuntimeError where nobody comes."""
        expected, came = _ids(before), {each["id"] for each in here}
        late = passed > (self._phase if self._id in expected else self._start).total_seconds()
        gone = not came & expected and passed > self._phase.total_seconds()
        everyone = expected <= came if expected else len(here) >= self._sites
        if late and not came & expected and len(here) < self._sites:
            raise RuntimeError(self._nobody_came(here, after_others=bool(expected)))
        if everyone or late or (gone and len(here) >= self._sites):
            known = before.get("setup") if came & expected else None
            self._close(number, here, known or here[0]["setup"])

    def _nobody_came(self, here: list[dict[str, str]], *, after_others: bool) -> str:
        names = ", ".join(arrival["name"] for arrival in here)
        others = "the sites of the training there have ended or died, and " if after_others else ""
        return (
            f"{others}only {len(here)} of {self._sites} sites came to {self._address} within {self._start}: {names}; a "
            f"store serves one training, or give each a prefix="
        )

    def _is_over(self, number: int) -> bool:
        """Return True if a meeting was closed; of one long ago no record is left."""
        return bool(self._store.check([f"{number}/closed"])) or self._latest() >= number

    def _record(self, number: int) -> dict[str, Any]:
        """Return the record of a closed meeting, empty for another, and for one that a stopped site closed too late."""
        text = self._read(f"{number}/closed")
        return dict(json.loads(text)) if text and number > self._latest() - KEPT else {}

    def _arrivals(self, number: int) -> list[dict[str, str]]:
        places = range(1, self._store.add(f"{number}/count", 0) + 1)
        found = (self._read(f"{number}/arrival/{place}") for place in places)
        return [json.loads(text) for text in found if text]

    def _close(self, number: int, here: list[dict[str, str]], setup: str) -> None:
        """Write who is there, but for those that are set up differently; the first to do so wins."""
        record = json.dumps({"arrivals": [each for each in here if each["setup"] == setup], "setup": setup})
        if self._store.compare_set(f"{number}/closed", "", record).decode() == record and number > self._latest():
            self._store.set("latest", str(number))
            self._forget(number - KEPT)

    def _forget(self, number: int) -> None:
        """Take away all that a meeting has left in the store."""
        for place in range(1, self._store.add(f"{number}/count", 0) + 1):
            self._store.delete_key(f"{number}/arrival/{place}")
        for key in ("count", "closed"):
            self._store.delete_key(f"{number}/{key}")


def _ids(record: Mapping[str, Any]) -> set[str]:
    return {arrival["id"] for arrival in record.get("arrivals", ())}


def _host_and_port(address: str) -> tuple[str, int]:
    """Split "10.0.0.1:29400" or "[::1]:29400". Raises ValueError for another text."""
    host, _, port = str(address).rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in host and bare == host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"the address of a rendezvous is host:port, such as 10.0.0.1:29400 or [fd00::1]:29400, with a port from 1 to "
            f"65535; got {address!r}"
        )
    return bare, int(port)


def _connected(host: str, port: int, address: str) -> dist.TCPStore:
    try:
        _await_listener(host, port, address)
        return dist.TCPStore(host, port, is_master=False, timeout=CONNECT)
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"no rendezvous answers at {address}: keep one there by `gradwire rendezvous --port {port}`. {error}"
        ) from error


def _await_listener(host: str, port: int, address: str) -> None:
    """Wait for a store that still starts: torch itself would wait for minutes. Raises OSError where none does."""
    deadline, warned = time.monotonic() + SEARCH, False
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), PAUSE)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise
            if not warned:
                logger.warning("no rendezvous answers at %s yet, tried for %.0f s: %s", address, SEARCH, error)
            warned = True
            time.sleep(PAUSE)


def keep(port: int) -> dist.TCPStore:
    """A store in which sites meet, as long as this process keeps it. Raises RuntimeError where the port is taken."""
    return dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=OPEN_END)
