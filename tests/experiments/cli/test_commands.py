import subprocess
import sys

import pytest

from gradwire.experiments.cli import COMMANDS, main, split_specs
from gradwire.experiments.cli.arguments import fields_of


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_s_defaults_are_accepted_by_its_dataclass(name, capsys):
    assert fields_of(COMMANDS[name].config_class())
    with pytest.raises(SystemExit):
        main([name, "--print-config"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("none", ["none"]),
        ("none, bf16,", ["none", "bf16"]),
        ("powersgd:rank=1,start_iter=10,onebit", ["powersgd:rank=1,start_iter=10", "onebit"]),
        ("topk:ratio=0.1,fp16+powersgd:rank=1,seed=2", ["topk:ratio=0.1", "fp16+powersgd:rank=1,seed=2"]),
        ("powersgd:rank=1,warmup=topk:ratio=0.1,none", ["powersgd:rank=1,warmup=topk:ratio=0.1", "none"]),
    ],
)
def test_a_comma_starts_a_specification_unless_an_option_follows(text, expected):
    assert split_specs(text) == expected


def test_a_command_imports_only_what_it_needs():
    code = (
        "import sys; from gradwire.experiments.cli import main; main(['info', '--json']);"
        "print([m for m in ('matplotlib', 'sklearn', 'jinja2', 'wandb', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
