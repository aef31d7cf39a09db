"""The secret that sites share: the key that proves it, and TLS where its file holds a private key with its certificate."""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

SECRET = "GRADWIRE_SECRET"
PATHS = ("/", "~", "./", "../")  # what a secret does not begin with
FILES = (".pem", ".key", ".crt", ".cer", ".txt", ".secret", ".token")  # nor end with
OTHERS = stat.S_IRWXG | stat.S_IRWXO  # what anybody but the owner may do with a file
LEAST = 16  # characters of a secret
PAIRS, STEPS = 12, 8  # different neighbours in it, and different distances between them: fewer are a pattern
PRIVATE = "PRIVATE KEY-----"  # in the file of a key
MAKE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=gradwire "
    "-keyout sites.pem -out sites.pem"
)
SALT = b"gradwire sites 2"  # the same for all, as two sites share nothing but the secret
COST = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 64 << 20}  # 32 MiB and about 0.15 s


@dataclass(frozen=True)
class Secret:
    """The secret of all sites of a training. `text`: empty where there is none.

    `pair`: the file of a private key with its certificate. All sites have the same one, and connections use TLS.
    """

    text: str = field(default="", repr=False)
    pair: Path | None = None

    @classmethod
    def of(cls, given: str | Path | Secret | None) -> Secret:
        """Return a secret: as given, or from a file, or from the environment.

        Raises ValueError for a file that is empty or open to others, for a text that looks like a path or a key, and for one
        that can be guessed.
        """
        if isinstance(given, Secret):
            return given
        if isinstance(given, Path):
            text = given.read_text("utf-8").strip()
            if not text:
                raise ValueError(f"the file {given} holds no secret")
            _refuse_open(given)
            made = cls(text, given if PRIVATE in text else None)
        else:
            made = cls(os.environ.get(SECRET, "") if given is None else given)
            if _is_path(made.text) or PRIVATE in made.text:
                raise ValueError(
                    f"a secret is a text that is no private key and no path: it begins with none of {' '.join(PATHS)}, ends "
                    f"with none of {' '.join(FILES)}, and is no file's name. For a file give secret=pathlib.Path(...) to "
                    f"Rendezvous, or --secret-file to gradwire rendezvous; got {made.text[:2]!r}..."
                )
        made._refuse_weak()
        return made

    def _refuse_weak(self) -> None:
        """Raise ValueError for a secret that can be guessed: who records a connection may try many, without asking."""
        text = self.text
        if text and len(text) < LEAST:
            raise ValueError(f"a secret has at least {LEAST} characters, so that nobody guesses it; got {len(text)}")
        neighbours = set(pairwise(text))
        steps = {ord(after) - ord(before) for before, after in neighbours}
        if text and (len(neighbours) < PAIRS or len(steps) < STEPS):
            raise ValueError(
                f"a secret is not a repeated or consecutive text, which is guessed: this one of {len(text)} characters has "
                f"{len(neighbours)} different pairs of neighbours. Take the one that `gradwire rendezvous` makes, or "
                "`openssl rand -hex 32`"
            )

    @property
    def key(self) -> bytes:
        """The key that proves the secret; without a secret everybody knows it."""
        return _derived(self.text)

    @cached_property
    def dialing(self) -> ssl.SSLContext | None:
        """TLS of connections that this site opens; None where there is none."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    @cached_property
    def listening(self) -> ssl.SSLContext | None:
        """TLS of connections that others open."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: int) -> ssl.SSLContext | None:
        """Return TLS in which both ends have to own the same pair. Raises ValueError for a file that is none."""
        if self.pair is None:
            return None
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # all sites have one certificate, whatever their addresses are
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.pair)
            context.load_verify_locations(self.pair)
        except OSError as error:
            raise ValueError(
                f"{self.pair} holds no private key with its own certificate: make both by `{MAKE}`. {error}"
            ) from error
        return context


def _is_path(text: str) -> bool:
    """Return True for a text that a path is more likely to be than a secret."""
    return text.startswith(PATHS) or text.lower().endswith(FILES) or (bool(text) and os.path.exists(text))


def _refuse_open(file: Path) -> None:
    """Raise ValueError for a file of this user that others may use, as ssh does. Another owner decides on theirs."""
    found = file.stat()
    if os.name == "posix" and found.st_uid == os.getuid() and found.st_mode & OTHERS:
        raise ValueError(
            f"other users of this host may use the secret in {file}, whose mode is {oct(stat.S_IMODE(found.st_mode))}: "
            f"`chmod 600 {file}`, so that its owner alone may"
        )


@lru_cache(maxsize=16)
def _derived(text: str) -> bytes:
    """Return the key of a secret.

    Who records the beginning of a connection can try secrets on it, as fast as they turn into keys. scrypt makes each trial
    cost memory as well as time, so that graphics cards gain little (RFC 7914); a single hash would cost nanoseconds.
    """
    if not text:
        return hashlib.sha256(SALT).digest()
    return hashlib.scrypt(text.encode(), salt=SALT, dklen=32, **COST)
