"""A site at the rendezvous: before each round it asks for the next meeting, and goes on with those that came."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
import weakref
from collections.abc import Collection, Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...ddp_core.averaging.same_kernels import follow_kernels, kernel_offer
from ...kernels.dispatch import requested_backends
from .background import Background, Closed
from .late_sites import Claim, is_identity
from .link import Connection, LinkError, Listener, NotProven, dial, shown
from .meeting import CPU, Lines, Meeting, SiteMeeting
from .mesh import Mesh, Parking, connected
from .offers import checked_offers
from .records import BYTES, BadRecord, checked_name, field, is_text, read, site_of, written
from .relay import joined
from .secret import Secret
from .server import refuse_open
from .server_meetings import PHASES

logger = logging.getLogger(__name__)
ATTEMPTS = 5  # to connect
SEARCH = 20.0  # seconds in which a rendezvous may still come up, or come back
PAUSE = 0.5  # seconds between two attempts to reach it
SPARE = 60.0  # seconds beyond the limits of a wait
NOBODY = Claim()


class TrainingEnded(RuntimeError):
    """The other sites have ended the training, after `round`."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.round = number


class Rendezvous:
    """The meeting point of sites that may join and leave: a server such as `gradwire rendezvous`.

    Without a secret, sites listen at loopback and private addresses only. Where the server relays, they do not listen.

    Args:
        address: the server's "host:port"; or several, with commas between them. If one stops answering, all sites
            continue at the next.
        sites: the number of sites to wait for at the very start.
        name: this site's name in messages: printable characters.
        limit: time limit of a round, the same at all sites. Less than half of the sites wait the whole of it for the
            others, and exactly half, with the one that came first, a third. Then they continue without the others.
        grace: longest wait for the last sites of a round, once more than half of them are there; by default a third of
            `limit`. The same at all sites. A site that is later is left out, and returns with the others' current model.
        start: limit of the wait at the start.
        prefix: separates trainings that share a server.
        secret: a text, or the `pathlib.Path` of a file that holds it; by default the text in the environment's
            GRADWIRE_SECRET. A file with a private key and its certificate (PEM) encrypts connections by TLS.
        listen: the "host:port" at which other sites reach this one; by default a free port at the address that reaches
            the server.

    Attributes:
        grace: as above; a new value counts from the next round on.

    Raises:
        ValueError: an argument is malformed or out of range, the secret can be guessed, or strangers may reach a site that
            has none.
        RuntimeError: no rendezvous answers, or its secret differs.
    """

    def __init__(
        self,
        address: str,
        sites: int,
        *,
        name: str | None = None,
        limit: timedelta = timedelta(minutes=3),
        grace: timedelta | None = None,
        start: timedelta = timedelta(minutes=30),
        prefix: str = "training",
        secret: str | Path | None = None,
        listen: str | None = None,
    ) -> None:
        self._servers = [_host_and_port(each.strip()) for each in str(address).split(",")]
        self._address = self._shown_address
        if sites < 1 or limit.total_seconds() <= 0:
            raise ValueError(f"sites is at least 1 and limit above 0; got {sites} and {limit}")
        if grace is not None and not 0 <= grace.total_seconds() <= limit.total_seconds() / PHASES:
            raise ValueError(f"grace is from 0 to a third of limit; got {grace}, where limit is {limit}")
        # after which a round has failed for sure: ten limits, and the wait at the start
        self.patience = 10 * limit.total_seconds() + start.total_seconds()
        self._sites, self._start, self._phase = sites, start, limit / PHASES
        self.grace = self._phase if grace is None else grace
        self._id = uuid.uuid4().hex[:12]
        self._given = self._name, self._prefix = (
            checked_name("the name of a site", name or f"site {self._id}"),
            checked_name("the prefix of a training", prefix),
        )
        self._secret, self._listen = Secret.of(secret), _host_and_port(listen) if listen else None
        self._met = 0  # the number of the last meeting
        self._epoch, self._expected = "", frozenset[str]()
        self._meeting: SiteMeeting | None = None
        self._token = self._setup = ""
        self._kernels: dict[str, Any] = {}  # what this site offers to run operations on
        self._open()
        seen = self._ask({"ask": "look"}, SEARCH)
        here, self._relayed = seen["own"], seen.get("relay") is True  # all servers relay, or none does
        self._bind = self._listen or (here, 0)
        self._host = here if self._bind[0] in ("0.0.0.0", "::") else self._bind[0]  # to other sites
        if not self._relayed:
            refuse_open(self._bind[0], self._secret)
        if not self._secret.text:
            logger.warning(
                "%s has no secret: whoever reaches %s, or the port at which the site listens, can read and change the "
                "training. Give all sites the same secret= or GRADWIRE_SECRET",
                self._name,
                address,
            )

    def _open(self) -> None:
        """Make the thread of all connections, which `close` ends. The first meeting begins to listen."""
        self._closed, self._background, self._parking = False, Background(), Parking(self._id)
        self._listener: Listener | None = None
        weakref.finalize(self, self._background.close)

    def divide(self, rank: int, size: int) -> None:
        """Meet equal ranks of other sites alone, where a site has `size` of them."""
        name, prefix = self._given
        if size > 1:
            name, prefix = f"rank {rank} of {name}", f"{prefix}, rank {rank} of {size}"
        self._name, self._prefix = name, prefix

    def join(self, setup: str, operations: Collection[str] = (), *, varies_with_threads: bool = False) -> None:
        """Remember how this site is set up; the server compares at every meeting.

        `operations`: of kernels, which run on the same backend at all sites of a meeting.
        `varies_with_threads`: True if a site's threads change its arithmetic.
        """
        self._expected = frozenset()
        requested = ", ".join(requested_backends()) if operations else ""
        kernels = f", kernels on {requested}" if requested else ""
        limit = PHASES * self._phase.total_seconds()
        waits = f"limit={limit:g} s, grace={self.grace.total_seconds():g} s"
        self._setup, self._met = f"{setup}, {waits}, gradwire {_release()}{kernels}", 0
        self._kernels = kernel_offer(operations, CPU, varies_with_threads=varies_with_threads)
        if self._closed:  # by a training before this one
            self._open()

    def meet(self, claim: Claim = NOBODY) -> Meeting:
        """Come to the next meeting, and connect with those that did.

        Raises RuntimeError where that fails repeatedly, ValueError where sites were set up differently, and TrainingEnded.
        """
        for attempt in range(ATTEMPTS):
            record = self._arrived(claim)
            names = [site.name for site in record["sites"]]
            ids = frozenset(site.id for site in record["sites"])
            if lost := self._expected - ids:
                number = max(record["round"], 0) + 1
                logger.warning("round %d continues without %d sites: with %s", number, len(lost), ", ".join(names))
            self._expected = ids
            try:
                return self._connected(record)
            except RuntimeError as error:  # one has died since
                if self._closed:
                    raise
                self.break_up(error)
                if attempt == ATTEMPTS - 1:
                    raise RuntimeError(
                        f"{', '.join(names)} reach the rendezvous at {self._address}, but not each other: open the ports "
                        f"between them, or give listen= an address of each site that the others reach, or start the "
                        f"rendezvous by --relay. {error}"
                    ) from error
        raise AssertionError("unreachable")

    def _arrived(self, claim: Claim) -> dict[str, Any]:
        """Return the record of the next meeting, once the server waits for no other site."""
        try:
            port, start = self._listening(), self._start.total_seconds()
            who = {"id": self._id, "name": self._name, "host": self._host, "port": port, "link": self._token}
            stands = {"epoch": self._epoch, "met": self._met, "training": claim.training, "round": claim.round}
            limits = {
                "sites": self._sites,
                "known": len(self._expected),
                "phase": self._phase.total_seconds(),
                "grace": self.grace.total_seconds(),
                "start": start,
            }
            question = {"ask": "meet", "setup": self._setup, **who, **stands, **limits}
            record = self._ask(question, start + self.patience)
        except Closed as error:
            gave_up = f"{self._name} gave up waiting for other sites at {self._address}"
            raise RuntimeError(f"{gave_up}: it was closed") from error
        if record["kind"] == "error":
            raise self._refusal(record)
        _check(record, self._id, self._address)
        self._met = record["number"]
        self._epoch = record["epoch"]
        if record["refused"]:
            names = ", ".join(record["refused"])
            logger.warning("the rendezvous has refused %s, of another training or ahead of this one", names)
        return record

    def _listening(self) -> int:
        """Return the port at which other sites reach this one; 0 where they do so through a relay."""
        if self._relayed:
            return 0
        if self._listener is None:
            self._listener = Listener(self._secret, self._parking.park, self._phase.total_seconds())
            try:
                port = self._background.run(self._listener.open(*self._bind), SPARE)
            except OSError as error:
                self._listener = None
                raise RuntimeError(
                    f"{self._name} cannot listen at {self._bind[0]}:{self._bind[1]}: give listen= an address of this host "
                    f"and a free port. {error}"
                ) from error
            self._bind = self._bind[0], port
        return self._bind[1]

    def _refusal(self, record: Mapping[str, Any]) -> Exception:
        """Return the error for an answer that is no record of a meeting."""
        reason, said = (field(record, key, str, f"the answer of {self._address}") for key in ("error", "message"))
        if reason == "ended":
            return TrainingEnded(
                f"the training at {self._address} has ended, and {self._name} has missed its end: take the model of "
                "another site, or start all sites from their checkpoints to continue",
                field(record, "round", int, f"the answer of {self._address}"),
            )
        if reason == "setup":
            return ValueError(f"the sites were set up differently: the others have {said}, here {self._setup}")
        if reason == "alone":
            return RuntimeError(
                f"{said}. Start the other sites, or give each training at {self._address} a prefix= of its own"
            )
        if reason == "refused":
            return RuntimeError(f"{self._address} refuses {self._name}: {said}")
        return RuntimeError(f"{self._address} refuses a message of {self._name}: {said}")

    def _connected(self, record: Mapping[str, Any]) -> SiteMeeting:
        """Return the connections with the sites of a meeting, those of the last one where nobody came or went."""
        sites, meeting = record["sites"], self._meeting
        kept = {site.link for site in sites} == {self._token}  # all have the connections of the last meeting
        if meeting is None or not kept or len(sites) != meeting.ranks.world_size:
            self._drop()
            rank = next(place for place, site in enumerate(sites) if site.id == self._id)
            try:
                lines = self._background.run(self._lines(record, rank), self._phase.total_seconds() + SPARE)
            except TimeoutError as error:
                raise RuntimeError(f"the sites did not connect: {error}") from error
            names = [site.name for site in sites]
            self._meeting = meeting = SiteMeeting(self._background, lines, names, rank, self._phase)
            self._token = record["token"]
            offers = meeting.exchange(written(self._kernels))
            meeting.differ = follow_kernels(checked_offers(offers, names, self._kernels), rank, CPU)
        meeting.claim = Claim(record["training"], record["round"])
        lineage = hashlib.sha256(record["token"].encode()).digest()[:7]  # reports hold it as an int64
        meeting.lineage = int.from_bytes(lineage, "big")
        return meeting

    async def _lines(self, record: Mapping[str, Any], rank: int) -> Lines:
        """Return the connections with the other sites of a meeting."""
        seconds = self._phase.total_seconds()
        if record.get("relay") is not True:
            return Mesh(await connected(record["sites"], rank, record["token"], self._secret, self._parking, seconds))
        link = await dial(*self._servers[0], self._secret, "the relay", seconds)
        question = {"ask": "relay", "prefix": self._prefix, "token": record["token"], "id": self._id, "phase": seconds}
        return await joined(link, question, [site.name for site in record["sites"]], rank)

    def break_up(self, error: Exception) -> None:
        """Drop the connections; the next meeting finds out who is left."""
        logger.warning("a round, or connecting for it, failed, and the sites that are left repeat it: %s", error)
        self._drop()

    def _drop(self) -> None:
        meeting, self._meeting, self._token = self._meeting, None, ""
        if meeting is not None:
            meeting.close()

    def end(self, number: int) -> None:
        """Have the server remember that the training has ended after round `number`: a site that comes later raises."""
        message = {"ask": "end", "epoch": self._epoch, "meeting": self._met, "round": number}
        try:
            self._ask(message, SEARCH + SPARE)
        except RuntimeError as error:
            logger.warning("a late site cannot see that training has ended: %s", error)

    def close(self) -> None:
        """Close all connections; a thread that waits here for other sites raises RuntimeError."""
        self._closed = True
        with contextlib.suppress(Closed, TimeoutError):
            self._background.run(self._ended(self._meeting, self._listener), SPARE)
        self._meeting, self._token, self._listener = None, "", None
        self._background.close()

    async def _ended(self, meeting: SiteMeeting | None, listener: Listener | None) -> None:
        self._parking.clear()
        if meeting is not None:
            meeting.lines.shut()
        if listener is not None:
            listener.close()

    def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the server's answer. Raises RuntimeError where there is none in time, Closed after `close`."""
        try:
            return self._background.run(self._answer({**message, "prefix": self._prefix}), seconds + SPARE)
        except TimeoutError as error:
            raise RuntimeError(f"the rendezvous at {self._address} did not answer: {error}") from error

    @property
    def _shown_address(self) -> str:
        """The address of the server that this site asks."""
        return shown(*self._servers[0])

    async def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Ask until there is an answer: a connection may be lost while the site waits, and the server may start anew.

        For one question each server is left once at most.
        """
        lost_at, left = 0.0, len(self._servers) - 1
        while True:
            began = time.monotonic()
            try:
                link = await dial(*self._servers[0], self._secret, "the rendezvous")
                return await self._answer_over(link, message)
            except NotProven:
                raise
            except LinkError as error:  # of a rendezvous under attack, too: it closes some connections early
                now = time.monotonic()
                if not lost_at or now - began > SEARCH:  # the first loss, or one after a long wait
                    lost_at, told = now, "no rendezvous answers at %s yet, tried for %.0f s: %s"
                    logger.warning(told, self._address, SEARCH, error)
                elif now - lost_at > SEARCH and left:
                    self._servers.append(self._servers.pop(0))
                    gone, self._address, lost_at, left = self._address, self._shown_address, 0.0, left - 1
                    logger.warning("no rendezvous answers at %s: this site continues at %s", gone, self._address)
                elif now - lost_at > SEARCH:
                    raise RuntimeError(
                        f"no rendezvous answers at {self._address}: keep one there by `gradwire rendezvous --port "
                        f"{self._servers[0][1]}`. {error}"
                    ) from error
                await asyncio.sleep(PAUSE)

    async def _answer_over(self, link: Connection, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            await link.send(written(message))
            answer = read(await link.receive(BYTES), f"the answer of {self._address}")
            field(answer, "kind", str, f"the answer of {self._address}")
            return {**answer, "own": link.own_address}
        finally:
            link.close()


def _check(record: dict[str, Any], own: str, address: str) -> None:
    """Turn the sites of a meeting into `Site`s. Raises BadRecord for a meeting that cannot be one."""
    what = f"the record of a meeting from {address}"
    for key in ("number", "round"):
        field(record, key, int, what)
    for key in ("training", "token", "epoch"):
        field(record, key, str, what)
    if not record["training"] or not is_identity(record["training"]):
        raise BadRecord(f"{what} has the identity of a training; got {record['training'][:20]!r}")
    for site in field(record, "sites", list, what):
        if not isinstance(site, dict):
            raise BadRecord(f"{what} lists sites; got {site!r}")
    record["sites"] = [site_of(site, f"a site in {what}") for site in record["sites"]]
    if sum(site.id == own for site in record["sites"]) != 1:
        raise BadRecord(f"{what} does not have this site in it once")
    if not all(map(is_text, field(record, "refused", list, what))):
        raise BadRecord(f"{what} names the sites that were refused; got {record['refused']!r}")


def _release() -> str:
    """Return the release of gradwire: sites of different ones may compress differently."""
    try:
        return version("gradwire")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"


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
