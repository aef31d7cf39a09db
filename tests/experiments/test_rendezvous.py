import os
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradwire import Rendezvous
from gradwire.experiments.cli import main
from gradwire.experiments.rendezvous import _shown, allow_files
from gradwire.hooks.internet.secret import Secret

from ..forked import Script

SECRET = "a secret of this test alone"


@contextmanager
def kept(*options, **environment):
    """The lines that the command prints, in a process that keeps the rendezvous until it is interrupted."""
    known = {key: value for key, value in os.environ.items() if key != "GRADWIRE_SECRET"} | environment
    words = ["rendezvous", "--port=0", *options]
    script = Script(
        f"import sys; from gradwire.experiments.cli import main; sys.exit(main({words!r}))", variables=known
    )
    try:
        yield script.said("Rendezvous(").splitlines()
    finally:
        script.interrupt()
        done = script.end()
    assert done.code == 0, done.errors


def reached(lines, secret):
    """Whether a site reaches the address that the command has printed."""
    address = next(line for line in lines if "Rendezvous(" in line).split('Rendezvous("')[1].split('"')[0]
    port = int(lines[0].split("port ")[1].split()[0])
    assert address.endswith(f":{port}")
    at = Rendezvous(f"127.0.0.1:{port}", 1, secret=secret)
    at.join("alone")
    return at.meet().ranks.world_size == 1


def test_sites_reach_it_until_it_is_interrupted():
    with kept() as lines:
        assert "127.0.0.1" in lines[0]
        assert reached(lines, "")


def test_beyond_this_host_it_makes_a_secret_and_prints_what_other_sites_need():
    with kept("--host", "0.0.0.0") as lines:
        secret = lines[1].split("export GRADWIRE_SECRET=")[1].strip()
        assert reached(lines, secret)
        with pytest.raises(RuntimeError, match="does not accept this site's secret"):
            reached(lines, "")


def test_a_given_secret_is_used_and_not_printed(tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    with kept("--secret-file", str(file)) as lines:
        assert SECRET not in "".join(lines)
        assert reached(lines, SECRET)


def test_a_file_with_a_certificate_is_named_to_other_sites():
    said = _shown("10.0.0.1", 29400, "", Secret("text", Path("/home/me/sites.pem")))
    assert 'Rendezvous("10.0.0.1:29400", sites=2, secret=pathlib.Path("sites.pem"))' in said
    assert "export" not in said


def test_a_port_that_is_taken_is_refused_in_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["rendezvous", "--port", str(taken.getsockname()[1])]) == 2
    assert "Give a free port by --port" in capsys.readouterr().err


def test_the_rendezvous_may_open_a_file_for_each_rank_of_each_site():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        allow_files(700)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (700 if hard == -1 else min(700, hard), hard)
        allow_files(600)  # it has more
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (min(700, hard) if hard != -1 else 700)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
