"""The secret of sites: what is refused, what a guess costs, and encryption by a private key with its certificate."""

import hashlib
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from gradwire import Rendezvous
from gradwire.hooks.internet import client, link, secret
from gradwire.hooks.internet.link import MAGIC, LinkError, Listener, NotProven, dial
from gradwire.hooks.internet.secret import Secret
from gradwire.hooks.internet.server import Server

from ..local_sgd.sites import EVENT, Town, together
from ..local_sgd.test_local_steps import assert_same, trained
from .test_attacks import Recorder

TEXT = "a secret of this test alone"
HERE = "127.0.0.1"
PAGE = Path(__file__).parents[3] / "docs" / "local-steps.md"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two private keys with their certificates, made as the page says."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    page = PAGE.read_text("utf-8").replace("\\\n", " ")
    command = re.search(r"^\$ (openssl req .*sites\.pem)$", page, re.MULTILINE)[1]
    assert shlex.split(command) == shlex.split(secret.MAKE)
    folders = [tmp_path_factory.mktemp("pair") for _ in range(2)]
    for folder in folders:
        subprocess.run(shlex.split(command), cwd=folder, check=True, capture_output=True)
    return [folder / "sites.pem" for folder in folders]


def test_only_the_owner_reads_a_key_that_is_made(pairs):
    assert pairs[0].stat().st_mode & 0o077 == 0


PATTERNS = ["a" * 40, "password" * 3, "0123456789abcdef", "abcdefghijklmnopqrst", "1234" * 5, "qwertyqwertyqwerty"]
PATHS = ["/run/secrets/sites", "~/sites.txt", "./sites.txt", "../sites.txt", "keys/sites.pem", "my-sites-2026.key"]
PATHS += ["C:/Users/me/Sites.PEM", "where/the/secret/lies.txt"]
REFUSED = [
    *((each, "not a repeated or consecutive text") for each in (*PATTERNS, "-_" * 10)),
    *((each, r"no path: .* give secret=pathlib\.Path\(\.\.\.\)") for each in PATHS),
    ("password", "at least 16 characters"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_a_pattern_a_path_or_a_short_text_is_no_secret(text, words):
    with pytest.raises(ValueError, match=words):
        Secret.of(text)


def test_a_path_in_the_environment_is_refused_with_the_option_that_takes_it(monkeypatch):
    monkeypatch.setenv("GRADWIRE_SECRET", PATHS[0])
    with pytest.raises(ValueError, match="--secret-file"):
        Secret.of(None)


@pytest.mark.parametrize(
    "text", [TEXT, "Zx8_qLm2-Tr5vBn9", "correct horse battery staple", hashlib.sha256().hexdigest()]
)
def test_a_secret_that_is_none_is_taken(text):
    assert Secret.of(text).text == text


def test_a_guess_costs_32_mebibytes_and_a_site_pays_once():
    asked = {"salt": b"gradwire sites 2", "n": 32768, "r": 8, "p": 1, "maxmem": 1 << 27, "dklen": 32}
    assert Secret(TEXT).key == hashlib.scrypt(TEXT.encode(), **asked)
    assert 128 * secret.COST["n"] * secret.COST["r"] == 32 << 20
    assert Secret(TEXT).key is Secret(TEXT).key


def test_a_private_key_is_given_as_a_file(pairs):
    with pytest.raises(ValueError, match=r"is no private key and no path: .* give secret=pathlib\.Path"):
        Secret.of(pairs[0].read_text())


def test_the_name_of_a_file_that_is_there_is_no_secret(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret-of-all-sites").write_text(TEXT)
    with pytest.raises(ValueError, match="is no file's name"):
        Secret.of("secret-of-all-sites")


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o604, 0o620, 0o666])
def test_a_file_of_ones_own_that_others_may_use_is_refused(tmp_path, monkeypatch, mode):
    file = tmp_path / "secret"
    file.write_text(TEXT)
    file.chmod(mode)
    if mode in (0o400, 0o600):
        assert Secret.of(file).text == TEXT
        return
    with pytest.raises(ValueError, match=f"secret in {file}, whose mode is {oct(mode)}: `chmod 600 {file}`"):
        Secret.of(file)
    another = file.stat().st_uid + 1  # of a group, which its owner lets read it
    monkeypatch.setattr(secret.os, "getuid", lambda: another)
    assert Secret.of(file).text == TEXT


def test_no_text_of_an_object_shows_the_secret():
    shared = Secret.of(TEXT)
    assert TEXT not in f"{shared} {shared!r} {[shared]}"


@pytest.mark.parametrize("text", [f"-----BEGIN {secret.PRIVATE}\n{TEXT}", None])
def test_a_file_that_lacks_a_certificate_or_a_key_is_refused(tmp_path, pairs, text):
    key = pairs[0].read_text().partition("-----BEGIN CERTIFICATE")[0]
    file = tmp_path / "sites.pem"
    file.write_text(text or key)
    file.chmod(0o600)
    with pytest.raises(ValueError, match="holds no private key with its own certificate: make both by `openssl req"):
        Server(secret=file)


@pytest.mark.parametrize("relay", [False, True])
def test_sites_with_a_certificate_train_and_nobody_on_the_way_reads_anything(pairs, relay):
    server = Server(secret=pairs[0], relay=relay)
    recorder = Recorder(server.port)
    address, options = f"{HERE}:{recorder.port}", {"secret": pairs[0], "prefix": "visible"}
    made = [Town.at(address, 2, f"site {place}", **options) for place in range(2)]
    results = together(2, lambda place: trained(place, made[place]))
    assert_same(model for model, _, _ in results)
    said = [bytes(each) for each in recorder.said]
    assert said
    assert all(each[:1] == b"\x16" for each in said)  # a handshake of TLS
    assert not any(words in each for each in said for words in (MAGIC, b"visible", b"site 0"))
    recorder.close()
    server.close()


def test_without_a_certificate_the_same_can_be_read():
    server = Server(secret=TEXT)
    recorder = Recorder(server.port)
    Rendezvous(f"{HERE}:{recorder.port}", 1, secret=TEXT, prefix="visible").close()
    assert any(MAGIC in each and b"visible" in each for each in recorder.said)
    recorder.close()
    server.close()


def test_sites_with_different_certificates_or_none_do_not_connect(pairs, monkeypatch, background):
    monkeypatch.setattr(client, "SEARCH", 0.3)
    monkeypatch.setattr(client, "PAUSE", 0.1)
    first, second = map(Secret.of, pairs)
    plain = Secret(first.text)  # the same key, without TLS
    sealed, open_ = Server(secret=first), Server(secret=plain)
    with pytest.raises(NotProven, match="has another certificate: give all sites the same file"):
        background.run(dial(HERE, sealed.port, second, "it"), EVENT)
    with pytest.raises(LinkError, match="may have a secret with a certificate"):
        background.run(dial(HERE, sealed.port, plain, "it"), EVENT)
    with pytest.raises(LinkError, match="or has a secret without a certificate"):
        background.run(dial(HERE, open_.port, first, "it"), EVENT)
    with pytest.raises(NotProven, match=r"has another secret|does not accept"):
        background.run(dial(HERE, sealed.port, Secret("another text here", first.pair), "it"), EVENT)
    for server in (sealed, open_):
        server.close()


def test_strangers_have_no_more_places_before_a_handshake_of_tls(pairs, background, monkeypatch):
    monkeypatch.setattr(link, "STRANGERS", 64)

    async def serve(other):
        await other.receive()

    shared = Secret.of(pairs[0])
    listener = Listener(shared, serve)
    port = background.run(listener.open(HERE, 0), EVENT)
    strangers = [socket.create_connection((HERE, port), timeout=EVENT) for _ in range(3 * link.STRANGERS)]
    member = background.run(dial(HERE, port, shared, "it"), EVENT)
    assert len(listener._strangers) <= link.STRANGERS
    for each in strangers:
        each.close()
    for close in (member.close, listener.close):
        background._loop.call_soon_threadsafe(close)
