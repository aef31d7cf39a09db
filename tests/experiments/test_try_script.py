"""`gradwire try` with scripts that write what `report_loss` would, without torch."""

import json
import sys

import pytest

from gradwire.experiments.cli import main

SCRIPT = """
import json, os
losses = {"none": 2.0, "int4": 2.02, "int8": 1.99}
loss = losses[os.environ["GRADWIRE_COMPRESSOR"]]
for rank in range(2):
    with open(os.environ["GRADWIRE_TRY_FOLDER"] + f"/rank-{rank:05}.jsonl", "w") as file:
        for step in range(int(os.environ["GRADWIRE_TRY_STEPS"])):
            falling = loss + (0.1 if rank else -0.1) + (5 if step < 15 else 0)
            line = {"loss": falling, "at": 100 + 0.2 * loss * step, "sent_bytes": 1000.0, "ratio": 7.5}
            print(json.dumps(line), file=file)
"""


def tried(tmp_path, script, *flags, code=0):
    arguments = ["--steps=20", f"--out={tmp_path / 'out'}", f"--json={tmp_path / 'rows.json'}", *flags]
    assert main(["try", *arguments, "--", sys.executable, "-S", "-c", script]) == code
    return json.loads((tmp_path / "rows.json").read_text())["rows"]


def test_a_script_runs_once_with_each_compressor_and_losses_are_means_over_ranks_and_last_steps(tmp_path, capsys):
    none, int4, int8 = tried(tmp_path, SCRIPT, "--compressors=none,int4,int8")
    assert [each["loss"] for each in (none, int4, int8)] == pytest.approx([2.0, 2.02, 1.99])
    assert none["step_seconds"] == pytest.approx(0.4)
    assert (none["sent_bytes_per_step"], none["compression_ratio"], none["steps"]) == (1000.0, 7.5, 20)
    shown = capsys.readouterr().out
    assert "+1.0%" in shown
    assert "-0.5%" in shown
    assert "One seed cannot decide differences of less than 2 to 3%. " in shown
    assert "another seed changes a distance to none by" in shown
    assert "Keep your script: no other compressor saves 9 % or more of the step of none, at a" in shown


@pytest.mark.parametrize(
    ("losses", "seconds", "first", "verdict"),
    [
        ((2.0, 2.0, 2.05), (0.4, 0.2, 0.1), "none", "Take int8: it saves 50 % of the step of none, at a training loss"),
        ((2.0, 2.0, 2.05), (0.4, 0.2, 0.19), "none", "Take int8: it saves 50 % of the step"),  # int4 saves 5 % more
        ((2.0, 2.0, 2.07), (0.4, 0.2, 0.1), "none", "Take int8: it saves 50 % of the step"),  # int4 loses 3.5 %
        ((2.0, 2.0, 2.0), (0.4, 0.37, 0.37), "none", "Keep your script: no other compressor saves 9 % or more"),
        ((2.0, 2.0, 2.0), (0.4, 0.5, 0.38), "bf16", "Keep bf16: no other compressor saves 9 % or more of the step of"),
    ],
)
def test_the_verdict_takes_the_last_of_8_bits_that_saves_enough_of_the_step_before_it_and_keeps_the_loss(
    losses, seconds, first, verdict, tmp_path, capsys
):
    place = f'["{first}", "int8", "int4"].index(os.environ["GRADWIRE_COMPRESSOR"])'
    script = SCRIPT.replace('losses[os.environ["GRADWIRE_COMPRESSOR"]]', f"{losses}[{place}]")
    script = script.replace("0.2 * loss", f"{seconds}[{place}]")
    tried(tmp_path, script, f"--compressors={first},int8,int4")
    assert capsys.readouterr().out.splitlines()[-1].startswith(verdict)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [((0.4, 0.2, 0.1), " Next step: int4 saves 50 % of that, and can cost loss."), ((0.4, 0.2, 0.19), "")],
)
@pytest.mark.parametrize("order", ["int8,int4", "int4,int8"])
def test_the_verdict_names_fewer_bits_as_the_next_step_where_they_save_enough(seconds, said, order, tmp_path, capsys):
    place = '["none", "int8", "int4"].index(os.environ["GRADWIRE_COMPRESSOR"])'
    script = SCRIPT.replace('losses[os.environ["GRADWIRE_COMPRESSOR"]]', "2.0").replace(
        "0.2 * loss", f"{seconds}[{place}]"
    )
    tried(tmp_path, script, f"--compressors=none,{order}")
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"at most 3 % above.{said}")


@pytest.mark.parametrize(
    ("resumed", "told"),
    [
        (
            "falling -= 5 * (step < 15)",
            "int8 20 from 2.0000. Seed the model and the data, and let no run find the checkp",
        ),
        ("if step > 14: break", "none ran 20 steps from a loss of 7.0000, and int8 15 from 7.0000."),
    ],
)
def test_runs_that_do_not_begin_alike_get_no_verdict(resumed, told, tmp_path, capsys):
    first = SCRIPT.index("            line = ")
    script = f"{SCRIPT[:first]}            if os.environ['GRADWIRE_COMPRESSOR'] == 'int8':\n                {resumed}\n"
    script = (script + SCRIPT[first:]).replace('"int8": 1.99', '"int8": 2.0')
    tried(tmp_path, script, "--compressors=none,int8")
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("No verdict: the runs are not alike. ")
    assert told in verdict


@pytest.mark.parametrize(
    ("hosts", "on_cpus", "verdict"), [(1, True, "No verdict: "), (2, True, "Take "), (1, False, "Take ")]
)
def test_ranks_on_the_cpus_of_one_host_get_no_verdict(hosts, on_cpus, verdict, tmp_path, capsys):
    place = json.dumps(json.dumps({"hosts": hosts, "on_cpus": on_cpus}))
    place = f"open(os.environ['GRADWIRE_TRY_FOLDER'] + '/place.json', 'w').write({place})"
    script = SCRIPT.replace("0.2 * loss", "0.2 * (loss if loss == 2 else 1)")
    tried(tmp_path, f"{script}\n{place}", "--compressors=none,int8")
    assert capsys.readouterr().out.splitlines()[-1].startswith(verdict)


def test_a_script_that_ends_before_the_last_step_gets_no_verdict(tmp_path, capsys):
    end = "            if step > 11: break\n            line = "
    tried(tmp_path, SCRIPT.replace("            line = ", end), "--compressors=none,int8")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "No verdict: the script ended after 12 of 20 steps. Take --steps 12 at most."


def test_a_failed_run_is_shown_with_its_output_and_the_others_stand(tmp_path, capsys):
    failing = SCRIPT + "\nif loss == 2.02: raise SystemExit('no memory')"
    rows = tried(tmp_path, failing, "--compressors=none,int4,int8", code=1)
    assert [row["compressor"] for row in rows] == ["none", "int8"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "failed with int4: ended with exit code 1: GRADWIRE_COMPRESSOR=int4 " in shown
    assert "no memory" in shown


UNDER_TORCHRUN = """
import sys
raised = '''Traceback (most recent call last):
  File "/home/me/train.py", line 7, in <module>
    step()
ValueError: no such layer

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    clean_up()
train.BrokenStep: the cause
'''
for rank, lines in ((1, raised), (0, raised.replace("the cause", "connection closed by peer"))):
    print("\\n".join(f"[rank{rank}]: {line}" for line in lines.splitlines()))
print(raised.replace("train.BrokenStep: the cause", "torch.ChildFailedError: \\n" + 20 * "=====\\n"))
raise SystemExit(3)
"""


def test_the_exception_that_ended_a_training_is_shown_and_not_what_it_led_to(tmp_path, capsys):
    assert tried(tmp_path, UNDER_TORCHRUN, "--compressors=none", code=1) == []
    shown = capsys.readouterr().out
    assert "clean_up()\ntrain.BrokenStep: the cause\nlosses and output of the script" in shown  # nothing behind it
    assert "ended with exit code 3" in shown
    assert "Keep" not in shown


def test_both_compressors_of_fsdp2_are_taken(tmp_path, capsys):
    script = SCRIPT.replace('losses[os.environ["GRADWIRE_COMPRESSOR"]]', "2.0")
    unknown = script.replace(', "sent_bytes": 1000.0, "ratio": 7.5', "")
    script = f'import os\nexec({unknown!r} if os.environ["GRADWIRE_COMPRESSOR"] == "torch" else {script!r})'
    torchs, pair, _ = tried(tmp_path, script, "--compressors=torch,int8/int4,int8")
    assert (torchs["compressor"], torchs["sent_bytes_per_step"], pair["compressor"]) == ("torch", None, "int8/int4")
    assert " - │" in capsys.readouterr().out


def test_a_script_without_report_loss_is_told_what_to_call(tmp_path, capsys):
    assert tried(tmp_path, "", "--compressors=none", code=1) == []
    shown = " ".join(capsys.readouterr().out.split())
    assert "reported no losses. Call gradwire.report_loss(loss, handle) on all ranks" in shown


def test_a_command_that_is_not_there_is_a_failure(tmp_path, capsys):
    assert main(["try", "--compressors=none,int8", f"--out={tmp_path}", "--", "no-such-program-anywhere"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("no-such-program-anywhere cannot be run") == 1
    assert "The others are compared with it, so they were not tried." in shown
