"""Trials with a mishap: what each rank went through, and the laws of that."""

import json
import re
import time
import traceback
from pathlib import Path

from ..ranks import LostRank, RankFailure
from .draw import ALONE, LIMIT
from .rank import Rank, environment

NAMES = re.compile(
    r"bucket \d|parameters? |rank \d|which parameters they used|set up differently|how their first bucket|"
    r"whether they have swapped|what they hold back"
)
OTHERS = re.compile("/tests/|/torch/")  # files that are not ours
RETRIED = ("construction", "forward", "backward", "save", "swap")  # before others have heard of the step
WAITS, MORE = 4, 15.0  # limits that may pass one after the other, and seconds that a busy machine takes


def undergo(rank, world_size, trial):
    """Train; then tell what was raised, and when, by raising it once more."""
    with environment(trial):
        return undergone(rank, trial)


def undergone(rank, trial):
    began, me, number = time.monotonic(), None, -1
    try:
        me = Rank(trial, rank)
        for number in range(len(trial.steps)):
            began = time.monotonic()
            me.step(number)
    except Exception as error:
        told = {"type": type(error).__name__, "message": str(error), "seconds": time.monotonic() - began}
        told |= {"step": number, "where": where(error), "befallen": me is None or me.befallen}
        raise RuntimeError(json.dumps({**told, "then": afterwards(me, number)})) from error
    me.close()
    return {"befallen": me.befallen}


def where(error):
    """The innermost function of gradwire that an error went through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not OTHERS.search(each.filename)]
    return f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "outside"


def afterwards(me, number):
    """What a step after the failure raises, and the seconds that it and closing take."""
    if me is None or not hasattr(me, "handle"):
        return None
    began, message = time.monotonic(), ""
    try:
        me.step(min(number + 1, len(me.trial.steps) - 1))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    stepped = time.monotonic() - began
    me.close()
    return {"message": message, "seconds": stepped, "closing": time.monotonic() - began - stepped}


def broken(trial, answers, scale=1.0):
    """Sentences on all laws that do not hold; and messages that name neither bucket nor phase."""
    mishap, allowed = trial.mishap, scale * (WAITS * LIMIT + MORE)
    befell = befallen(answers[mishap.rank])
    found, vague = [] if befell else [f"nothing befell rank {mishap.rank}: it did not come to {mishap.place}"], []
    for rank, answer in enumerate(answers):
        victim = rank == mishap.rank
        if isinstance(answer, LostRank):
            if not (victim and mishap.kind == "kill"):
                found.append(f"rank {rank} {answer.fate}")
        elif isinstance(answer, RankFailure):
            failures, unclear = of_one(rank, victim, trial, answer, allowed)
            found, vague = found + failures, vague + unclear
        elif mishap.kind in ALONE:
            found.append(f"rank {rank} went on, though rank {mishap.rank} alone did a {mishap.kind}")
        elif mishap.kind == "kill" and not victim and isinstance(answers[mishap.rank], LostRank):
            found.append(f"rank {rank} went on without the one that was killed")
    return found, vague if trial.ours else []


def befallen(answer):
    """Whether the mishap took place, by the answer of the rank that it should befall."""
    if isinstance(answer, RankFailure):
        try:
            return json.loads(answer.message)["befallen"]
        except json.JSONDecodeError:
            return True  # it raised outside of steps, which is told
    return isinstance(answer, LostRank) or answer["befallen"]


def of_one(rank, victim, trial, failure, allowed):
    mishap, ours = trial.mishap, trial.ours
    try:
        told = json.loads(failure.message)
    except json.JSONDecodeError:
        return [f"rank {rank} raised outside of steps: {failure.type_name}: {failure.message[:300]}"], []
    found = []
    if mishap.harmless and mishap.kind != "kill":
        found.append(f"rank {rank} did not wait for what took {mishap.seconds:.1f} s: {told['message'][:300]}")
    if not victim and told["type"] != "RuntimeError":
        found.append(f"rank {rank} raised {told['type']}: {told['message'][:300]}")
    slept = mishap.seconds if mishap.kind in ("hang", "stop") else 0.0
    if told["seconds"] > allowed + slept:
        found.append(f"rank {rank} raised after {told['seconds']:.0f} s")
    if (then := told["then"]) is not None and then["seconds"] + then["closing"] > 2 * allowed:
        found.append(f"rank {rank} then took {then['seconds']:.0f} s for a step and {then['closing']:.0f} s to close")
    retried = mishap.place == "save" or (victim and mishap.place in (RETRIED if ours else (*RETRIED, "rebuild")))
    if then is not None and not then["message"] and not retried:
        found.append(f"rank {rank} could go on training after: {told['message'][:200]}")
    vague = not victim and not NAMES.search(told["message"])
    return found, [f"{mishap.kind} {mishap.place}, {told['where']}: {told['message'][:200]}"] if vague else []
