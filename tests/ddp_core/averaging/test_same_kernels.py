"""All ranks run an operation on one kernel backend, or are refused: their models would drift apart."""

from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import kernels
from gradwire.compress import Ranks, compressor
from gradwire.compress.simulate import operations_of
from gradwire.ddp_core import over
from gradwire.ddp_core.averaging import same_kernels, step_checks
from gradwire.kernels import dispatch

from ..errors import logged, warned
from ..wrapping import wrapped

AVAILABLE = {backend.name: backend for backend in kernels.backends()}
SPECS = ["powersgd:rank=2,min_compression_rate=0.1", "onebit", "hosts:ranks=2+powersgd:rank=1,min_compression_rate=0.1"]
native = pytest.mark.skipif(not AVAILABLE["native"].available, reason="the native extension is not built")


@contextmanager
def kernels_of(given):
    """A process with these kernels: `lacking` some, or requested backends, or what there is."""
    with ExitStack() as stack:
        for each in kernels.operations().values():
            stack.callback(each.agreed.clear)
        stack.callback(dispatch._choose_anew)
        if given and given.startswith("lacking "):
            for name in given.removeprefix("lacking ").split(","):
                answer = dispatch._backends[name]._answer
                before, answer[:] = list(answer), ["there is none in this test"]
                stack.callback(answer.__setitem__, slice(None), before)
            dispatch._choose_anew()
        elif given:
            stack.enter_context(kernels.use_backend(*given.split(",")))
        yield


def trained(rank, world_size, given, spec, api, device="cpu", operation=kernels.orthogonalize.name):
    """The parameters after some steps, what was logged, and the backend of an operation."""
    torch.manual_seed(0)
    model = nn.Linear(24, 16).to(device)
    with logged() as lines, kernels_of(given[rank]):
        ddp, handle = wrapped(api == "own", model, spec)
        for step in range(5):
            generator = torch.Generator().manual_seed(100 * rank + step)
            ddp(torch.randn(8, 24, generator=generator).to(device)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
        chosen = kernels.operations()[operation].chosen(device)
        handle.close()
    return [parameter.detach().cpu().clone() for parameter in model.parameters()], lines, chosen


@native
@pytest.mark.parametrize("api", ["own", "attach"])
@pytest.mark.parametrize("spec", SPECS)
def test_automatic_choices_that_differ_fall_back_together(ranks, spec, api):
    world_size = 4 if "hosts" in spec else 2
    given = [None] * (world_size - 1) + ["lacking native"]
    answers = ranks.run(trained, world_size, given, spec, api)
    for parameters, _, _ in answers[1:]:
        assert all(map(torch.equal, parameters, answers[0][0]))
    said = [line for line in answers[0][1] if "runs on the kernel backend reference" in line]
    assert len(said) == 1
    assert f"since ranks [{world_size - 1}] have no better one" in said[0]
    assert not any("runs on the kernel backend" in line for line in answers[-1][1])


@native
def test_an_automatic_choice_follows_a_requested_one(ranks):
    answers = ranks.run(trained, 2, [None, "reference"], SPECS[0], "own")
    assert all(map(torch.equal, answers[0][0], answers[1][0]))
    assert [chosen for _, _, chosen in answers] == ["reference", "reference"]


@native
def test_requested_backends_that_differ_are_refused_on_all_ranks(ranks):
    failures = ranks.run(trained, 2, ["native", "reference"], SPECS[0], "own", expect_errors=True)
    for failure in failures:
        assert "the ranks were set up differently" in failure.message
        assert "rank 0 has native (by use_backend), rank 1 has reference (by use_backend)" in failure.message


@native
def test_a_requested_backend_that_another_rank_lacks_is_refused(ranks):
    failures = ranks.run(trained, 2, ["native", "lacking native"], SPECS[1], "own", expect_errors=True)
    for failure in failures:
        assert "rank 0 has native (by use_backend), rank 1 has reference; request" in failure.message


@native
def test_what_needs_no_kernels_trains_on_different_backends(ranks):
    answers = ranks.run(trained, 2, ["native", "reference"], "none", "own")
    assert all(map(torch.equal, answers[0][0], answers[1][0]))


@contextmanager
def versions_of(found):
    """A process with these versions, and the texts of all warnings."""
    with pytest.MonkeyPatch.context() as patch, warned() as texts:
        patch.setattr(same_kernels, "_versions", lambda device: found)
        yield texts


def of_other_versions(rank, world_size, names):
    with versions_of({"torch": f"2.{8 + rank // 2}", "triton": "3.5", "compute capability": f"{8 + rank}.0"}) as texts:
        differ = same_kernels.agree_on_kernels(names, over(dist.group.WORLD), torch.device("cpu"))
    return differ, texts


@pytest.mark.parametrize("names", [{"sign_pack"}, set()])
def test_other_versions_and_gpus_are_one_warning_on_the_first_rank(ranks, names):
    (differ, (first,)), *others = ranks.run(of_other_versions, 3, names)
    assert differ
    assert others == [(True, [])] * 2
    assert "(torch: 2.8 on ranks [0, 1], 2.9 on ranks [2]; compute capability: 8.0 on ranks [0], 9.0" in first


def trained_apart(rank, world_size, api, spec, alike, drifts):
    """The warnings of a training in which rank 1 changes a parameter by itself before the third of seven steps."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    with pytest.MonkeyPatch.context() as patch, versions_of({"torch": "2.8" if alike else f"2.{8 + rank}"}) as texts:
        patch.setattr(step_checks, "REPLICA_STEPS", 2)
        ddp, handle = wrapped(api == "own", model, spec)
        for step in range(7):
            if drifts and (rank, step) == (1, 2):
                model.bias.data[0] += 2**-20
            ddp(torch.ones(1, 8)).sum().backward()
            model.zero_grad()
        handle.close()
    return [text for text in texts if "drift" in text]


@pytest.mark.parametrize("api", ["own", "attach"])
@pytest.mark.parametrize("spec", ["none", "onebit"])
def test_ranks_that_may_round_differently_compare_their_parameters(ranks, api, spec):
    first, second = ranks.run(trained_apart, 2, api, spec, False, True)
    assert second == []
    of_versions, of_drift = first
    assert "the ranks may round differently" in of_versions
    assert "after 2 steps the parameters of ranks [1] differ from those of rank 0" in of_drift


@pytest.mark.parametrize(("alike", "drifts", "told"), [(False, False, 1), (True, True, 0)])
def test_only_such_ranks_compare_and_equal_parameters_are_not_told(ranks, alike, drifts, told):
    first, second = ranks.run(trained_apart, 2, "own", "none", alike, drifts)
    assert (len(first), second) == (told, [])


def test_each_fallback_names_the_ranks_that_lack_better_backends_for_its_operations(monkeypatch, caplog):
    monkeypatch.setattr(same_kernels, "agree_on", lambda device, choices: None)
    best = ["cuda", "triton", "reference"]
    lacking = [{}, {"a": best[1:], "c": best[2:]}, {"b": best[1:]}]  # by rank
    rest = {"versions": {}, "threads": {}, "varies": False}
    offers = [{"offers": {"a": best, "b": best, "c": best} | each, **rest} for each in lacking]
    same_kernels.follow_kernels(offers, 0, torch.device("cpu"))
    assert [record.getMessage() for record in caplog.records] == [
        "c runs on the kernel backend reference, since ranks [1] have no better one",
        "a, b runs on the kernel backend triton, since ranks [1, 2] have no better one",
    ]


@pytest.mark.parametrize("spec", ["acp-powersgd", "topk:start_iter=3,warmup=onebit", "hosts:ranks=2+powersgd"])
def test_operations_are_those_of_all_steps_stages_and_ranks_of_a_host(spec):
    within = torch.float32, Ranks(4)
    expected = {
        "acp-powersgd": {"low_rank_left", "low_rank_right", "normalize", "orthogonalize"},
        "topk:start_iter=3,warmup=onebit": {"select_largest", "sign_pack"},
        "hosts:ranks=2+powersgd": {"low_rank_left", "orthogonalize"},
    }
    assert operations_of(compressor(spec), *within) >= expected[spec]
    assert operations_of(compressor("none"), *within) == set()


def with_threads(rank, world_size, spec, backend, dtypes):
    """Whether ranks with other numbers of threads may round differently, and the warnings."""
    torch.set_num_threads(1 + rank)
    names = operations_of(compressor(spec), dtypes[0], Ranks(world_size))
    varies = same_kernels.varies_with_threads(compressor(spec), names, dtypes)
    everyone, cpu = over(dist.group.WORLD), torch.device("cpu")
    with kernels_of(backend), warned() as texts:
        differ = same_kernels.agree_on_kernels(names, everyone, cpu, varies_with_threads=varies)
    torch.set_num_threads(1)
    return differ, texts


@native
@pytest.mark.parametrize(
    ("spec", "backend", "dtypes", "differ"),
    [
        ("powersgd:rank=33", None, [torch.float32], True),
        ("powersgd:rank=32", None, [torch.float32], False),
        ("powersgd:rank=32", None, [torch.bfloat16, torch.float32], False),
        ("powersgd:rank=32", None, [torch.float64], True),
        ("acp-powersgd:rank=4", None, [torch.float32, torch.float64], True),
        ("powersgd:rank=4", "reference", [torch.float32], True),
        ("int4", "reference", [torch.float32], False),
        ("int4", None, [torch.float64], False),
    ],
)
def test_threads_that_differ_count_where_torch_multiplies_matrices(ranks, spec, backend, dtypes, differ):
    (first, texts), second = ranks.run(with_threads, 2, spec, backend, dtypes)
    assert (first, second) == (differ, (differ, []))
    assert len(texts) == differ
    assert all("threads: 1 on ranks [0], 2 on ranks [1]" in text for text in texts)


class Mixed(nn.Module):
    """A layer of a dtype, and one of float32, whose bucket comes first."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8)

    def forward(self, inputs):
        return self.second(self.first(inputs).float())


def on_unlike_processors(rank, world_size, api, factors, dtype, unlike):
    """The warnings of a step of PowerSGD on ranks of unlike numbers of threads, or vector instructions."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, warned("drift") as texts:
        if unlike == "vectors":
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: f"level {rank}")
        else:
            torch.set_num_threads(1 + rank)
        ddp, handle = wrapped(api == "own", Mixed(dtype), f"powersgd:rank={factors},min_compression_rate=0")
        ddp(torch.ones(1, 8, dtype=dtype)).sum().backward()
        handle.close()
    torch.set_num_threads(1)
    return texts


@native
@pytest.mark.parametrize("api", ["own", "attach"])
@pytest.mark.parametrize(
    ("factors", "dtype", "unlike", "told"),
    [
        (33, torch.float32, "threads", "threads: 1 on ranks [0], 2 on ranks [1]"),
        (33, torch.float32, "vectors", "vectors: level 0 on ranks [0], level 1 on ranks [1]"),
        (4, torch.float64, "threads", "threads: 1 on ranks [0], 2 on ranks [1]"),
        (4, torch.float32, "threads", ""),
    ],
)
def test_training_on_unlike_processors_is_told_where_its_bits_depend_on_them(ranks, api, factors, dtype, unlike, told):
    first, second = ranks.run(on_unlike_processors, 2, api, factors, dtype, unlike)
    assert second == []
    assert len(first) == bool(told)
    assert all(told in text for text in first)
