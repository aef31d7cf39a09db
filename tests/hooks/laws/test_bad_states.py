"""Whatever is wrong with a saved state, under every wrapper: it is refused by ValueError before anything changes."""

import copy

import torch
import torch.distributed as dist

from ...ddp_core.errors import message_of
from ..given import same
from .wrappers import WHOLE, WRAPPERS, Training, alike, of_rank, over

NAME = "parts.0.p0"
NUMBERS = {  # what a residual may have become
    "nan": lambda numbers: numbers.clone().index_fill_(0, torch.tensor([0]), torch.nan),
    "inf": lambda numbers: numbers.clone().index_fill_(0, torch.tensor([0]), -torch.inf),
    "flat": lambda numbers: numbers.reshape(-1),
    "one more axis": lambda numbers: numbers.unsqueeze(0),
    "seven": lambda numbers: torch.zeros(7),
    "sparse": lambda numbers: numbers.to_sparse(),
    "meta": lambda numbers: numbers.to("meta"),
    "int": lambda numbers: numbers.int(),
    "bool": lambda numbers: numbers.bool(),
    "complex": lambda numbers: numbers.to(torch.complex64),
    "list": lambda numbers: numbers.tolist(),
    "None": lambda numbers: None,
}
INSIDE = {  # what a rank's state may have become
    "a list": lambda state: [state],
    "None": lambda state: None,
    "a step of text": lambda state: {**state, "step": "3"},
    "half a step": lambda state: {**state, "step": 2.5},
    "a step below 0": lambda state: {**state, "step": -1},
    "a step that is true": lambda state: {**state, "step": True},
    "parameters in a list": lambda state: {**state, "parameters": list(state["parameters"].items())},
    "numbers for names": lambda state: {**state, "parameters": dict(enumerate(state["parameters"].values()))},
    "no fields": lambda state: {**state, "parameters": dict.fromkeys(state["parameters"])},
    "emptied": lambda state: {**state, "parameters": {name: {} for name in state["parameters"]}},
    "without parameters": lambda state: {**state, "parameters": {}},
    "another format": lambda state: {**state, "gradwire": 99},
    "another field": lambda state: with_parameters(state, renamed_fields),
    "a parameter too many": lambda state: with_parameters(state, lambda its: {**its, "q9": its[NAME]}),
    "a parameter too few": lambda state: with_parameters(
        state, lambda its: {k: v for k, v in its.items() if k != NAME}
    ),
}
OF_BUCKETS = {  # of whole gradients
    "another compressor": lambda state: {**state, "compressor": "OneBit(block=8)", "spec": "onebit:block=8"},
    "64 ranks": lambda state: {**state, "world_size": 64},
    "hosts that share ranks": lambda state: {**state, "ranks_per_host": 3},
    "a tensor for the world size": lambda state: {**state, "world_size": torch.tensor([2, 2])},
    "no buckets": lambda state: {key: value for key, value in state.items() if key != "buckets"},
    "no list of buckets": lambda state: {**state, "buckets": 5},
    "buckets of numbers": lambda state: {**state, "buckets": [[0, 1]]},
    "a bucket twice": lambda state: {**state, "buckets": [*state["buckets"], *state["buckets"]]},
    "a bucket of a stranger": lambda state: {**state, "buckets": [["q8"], *state["buckets"]]},
    "emptied and old": lambda state: {
        **{key: value for key, value in state.items() if key != "tensors"},
        "parameters": {name: {} for name in state["parameters"]},
    },
}
OF_SHARDS = {"another compressor": lambda state: {**state, "reduce": "onebit"}}
WORDS = {  # what a refusal says
    "64 ranks": "world_size = 64",
    "another compressor": "swap()",
    "another format": "gradwire = 99",
    "no buckets": "lacks buckets",
    "a parameter too many": "q9",
    "a parameter too few": NAME,
    "a bucket of a stranger": "q8",
    "seven": NAME,
    "another rank's": "rank",
    "one rank's for all": "each of them once",
}


def with_parameters(state, change):
    return {**state, "parameters": change(state["parameters"])}


def renamed_fields(parameters):
    return {name: {f"{field}s": each for field, each in fields.items()} for name, fields in parameters.items()}


def with_numbers(state, change):
    changed = copy.deepcopy(state)
    fields = changed["parameters"][NAME]
    fields["residual"] = change(fields["residual"])
    return changed


def bad_states(state, whole):
    """{kind: a state that does not fit}."""
    changes = {**INSIDE, **(OF_BUCKETS if whole else OF_SHARDS)}
    inside = {kind: change(of_rank(state)) for kind, change in changes.items()}
    inside |= {kind: with_numbers(of_rank(state), change) for kind, change in NUMBERS.items()}
    return inside if whole else {kind: dict.fromkeys(state, each) for kind, each in inside.items()}


def refused(rank, world_size, wrapper):
    """What each bad state raises; whether the state, and steps, are those of a training that was loaded nothing into."""
    training, untouched = Training(wrapper), Training(wrapper)
    for each in (training, untouched):
        each.steps(0, 3)
    state, everyone_s = training.handle.state_dict(), [None] * world_size
    dist.all_gather_object(everyone_s, state)
    bad = {**bad_states(state, wrapper in WHOLE), "another rank's": everyone_s[rank - 1], "nothing": None, "empty": {}}
    answers = {kind: message_of(training.handle.load_state_dict, each) for kind, each in bad.items()}
    answers["one rank's for all"] = message_of(training.handle.load_state_dict, [state, state], resize=True)
    unchanged = alike(training.handle.state_dict(), state)
    if wrapper in WHOLE:
        training.handle.load_state_dict({**state, "compressor": "the same, of a version with fewer options"})
    goes_on = same(training.steps(3, 5), untouched.steps(3, 5))
    training.close()
    untouched.close()
    return answers, unchanged, goes_on


@over("attach", "own", "replicate", "FSDP2", "HSDP")
def test_a_bad_state_is_refused_and_changes_nothing(ranks, wrapper):
    for messages, unchanged, goes_on in ranks.run(refused, WRAPPERS[wrapper].world_size, wrapper):
        wrong = {kind: text for kind, text in messages.items() if not text.startswith("ValueError")}
        wrong |= {kind: messages[kind] for kind in WORDS.keys() & messages if WORDS[kind] not in messages[kind]}
        assert not wrong
        assert unchanged
        assert goes_on
