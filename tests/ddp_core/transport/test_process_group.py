"""Requests over a process group: what each rank is sent back, in every scope, against float64 by hand."""

import time
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gradwire.compress import AllGather, AllReduce, AllToAll, Broadcast, Gather, Ranks, ReduceScatter, Scatter
from gradwire.ddp_core import ProcessGroup
from gradwire.ddp_core.transport import private_group, process_group, torch_groups

LIMIT = timedelta(seconds=20)
CPU = torch.device("cpu")
SCOPES = ("all", "host", "across")
TO_ALL = (AllReduce, ReduceScatter, AllGather, AllToAll)


def numbers(rank, rows):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank))


def replies(rank, world_size, ranks_per_host):
    """By scope and request, the reply to this rank."""
    transport = ProcessGroup(dist.group.WORLD, CPU, LIMIT)
    transport.arrange(ranks_per_host)
    transport.open(2)
    found = {}
    for scope in SCOPES:
        rows = len(transport.ranks.members(scope))
        given, last = numbers(rank, rows), rows - 1  # a reply may take the place of what was sent
        requests = {each.__name__: each(given.clone(), scope=scope) for each in TO_ALL}
        requests |= {each.__name__: each(given.clone(), last, scope) for each in (Broadcast, Gather, Scatter)}
        requests["largest"] = AllReduce(given.clone(), "max", scope)
        for number, (name, request) in enumerate(requests.items()):
            found[scope, name] = transport.start(request, number % 2).wait(LIMIT).clone()
    dist.barrier()
    transport.abort()
    return found


@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(4, 2), (3, 1), (3, 3)])
def test_ranks_of_a_scope_get_what_its_members_gave(ranks, world_size, ranks_per_host):
    for rank, found in enumerate(ranks.run(replies, world_size, ranks_per_host)):
        for scope in SCOPES:
            group = Ranks(world_size, rank, ranks_per_host).members(scope)
            given = torch.stack([numbers(other, len(group)).double() for other in group])
            mine = group.index(rank)
            expected = {
                "AllReduce": given.mean(0),
                "ReduceScatter": given.mean(0)[mine],
                "AllGather": given,
                "AllToAll": given[:, mine],
                "Broadcast": given[-1],
                "Gather": given if mine == len(group) - 1 else given[:0],
                "Scatter": given[-1, mine],
                "largest": given.amax(0),
            }
            for name, tensor in expected.items():
                reply = found[scope, name].double()
                torch.testing.assert_close(reply, tensor, rtol=0, atol=1e-6, msg=f"{scope} {name}")


def rows_of(rank, world_size, sizes):
    """The parts of a sum that ranks hold, and all of them again, as NCCL's rows and as all-reduces."""
    tensor = torch.arange(float(sum(sizes))) + rank
    found = []
    for by_streams in (True, False):
        start = partial(process_group.started, group=dist.group.WORLD, by_streams=by_streams)
        part = start(ReduceScatter(tensor.clone(), "mean", sizes=sizes)).wait(LIMIT)
        found.append((part, start(AllGather(part.clone(), sizes=sizes)).wait(LIMIT)))
    return found


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 4, 1), (5, 2, 0), (3, 0, 0), (2, 5, 1)])
def test_rows_of_unequal_sizes_are_the_same_where_nccl_sends_them_as_equal_ones(ranks, sizes):
    expected = torch.arange(float(sum(sizes))) + 1
    for rank, found in enumerate(ranks.run(rows_of, 3, sizes)):
        for part, whole in found:
            torch.testing.assert_close(part, expected.split(sizes)[rank])
            torch.testing.assert_close(whole, expected)


def of_backend(name):
    """A group that has a backend of this name for every device."""
    return SimpleNamespace(size=lambda: 2, rank=lambda: 0, _get_backend=lambda _: SimpleNamespace(name=lambda: name))


class Asked:
    """A work on a GPU that counts who asks for its future, which is done."""

    count = 0

    def get_future(self):
        self.count += 1
        return SimpleNamespace(add_done_callback=lambda told: told(None))


@pytest.mark.parametrize("backend", ["nccl", "nccl2", None])
def test_on_cuda_a_reply_is_noted_where_its_work_tells_a_stream_behind_it(backend):
    """With Gloo no stream is told, and the newer NCCL's future would make the current stream wait."""
    reply, group = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)), backend and of_backend(backend)
    pending = process_group.GroupPending(work := Asked(), reply, by_streams=group)
    pending.expect_late_wait(lambda: 42.0)
    assert (pending.arrived, work.count) == ((42.0, 1) if backend == "nccl" else (None, 0))


@pytest.mark.parametrize("backend", ["nccl", "ncclx", "rccl", "gloo"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_streams_wait_for_replies_on_gpus_but_with_gloo(device, backend):
    by_streams = ProcessGroup(of_backend(backend), torch.device(device), LIMIT)._by_streams
    assert by_streams == (device == "cuda" and backend != "gloo")


@pytest.mark.parametrize(
    ("kind", "name", "by_streams"), [("Gloo", "fast", 0), ("Gloo", "nccl", 0), ("NCCL", "fast", 1)]
)
def test_what_inherits_from_gloo_is_waited_for_by_the_host_whatever_its_name_is(kind, name, by_streams):
    renamed = type("Renamed", (type(f"ProcessGroup{kind}", (), {}),), {"name": lambda self: name})
    group = SimpleNamespace(_get_backend=lambda _: renamed())
    assert torch_groups.orders_streams(group, torch.device("cuda")) == bool(by_streams)


def test_an_unknown_backend_on_gpus_is_waited_for_by_the_host_and_told_of_once(caplog):
    for _ in range(2):
        assert not torch_groups.orders_streams(of_backend("homemade"), torch.device("cuda"))
    assert caplog.text.count("does not know the backend homemade") == 1
    assert not torch_groups.orders_streams(of_backend("another"), CPU)
    assert "another" not in caplog.text


def test_gradients_on_a_gpu_never_move_to_a_backend_that_the_user_has_not_chosen(monkeypatch):
    monkeypatch.setattr(private_group, "store_of", lambda _: dist.HashStore())
    group = ProcessGroup(of_backend("ncclx"), torch.device("cuda"), LIMIT)
    with pytest.raises(RuntimeError, match=r"for cuda tensors, .* the model's group has ncclx there"):
        private_group.private_group(group.group, LIMIT, "a name", device=torch.device("cuda"))


class Private:
    """In the place of a private group of NCCL. `log`: what was done to it, and what streams were asked."""

    def __init__(self, log):
        self.log, self.names = log, {}

    def _get_backend(self, device):
        return SimpleNamespace(
            shutdown=lambda: self.log.append("shut down"), abort=lambda: self.log.append("broken off")
        )


def on_gpus(monkeypatch, log, looks):
    """A transport with a private group, on streams that are idle after so many looks at them."""

    class Event:
        def record(self, stream):
            log.append(f"behind {stream}")

        def query(self):
            log.append("idle?")
            return log.count("idle?") > looks

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(process_group, "new_name", lambda *_: "a name")
    transport = ProcessGroup(of_backend("nccl"), torch.device("cuda"), LIMIT)
    transport._groups = {(0, "all"): transport.group, (0, "host"): Private(log)}
    return transport


@pytest.mark.parametrize("end", ["finish", "arrange"])
def test_groups_of_a_gpu_are_shut_down_once_its_streams_are_idle(monkeypatch, end):
    log = []
    transport = on_gpus(monkeypatch, log, looks=2)
    transport.finish(time.monotonic() + 60) if end == "finish" else transport.arrange(2)
    assert log == ["behind the stream", "idle?", "idle?", "idle?", "shut down"]
    assert list(transport._groups) == ([] if end == "finish" else [(0, "all")])


def test_groups_of_a_gpu_are_broken_off_where_streams_are_not_idle_at_the_deadline(monkeypatch):
    log = []
    on_gpus(monkeypatch, log, looks=10**9).finish(time.monotonic())
    assert log[-1] == "broken off"


def made_of_nccl(monkeypatch, limit):
    """The options, the name and the description of a private group beside one of NCCL with a time limit."""
    made = SimpleNamespace(rank=lambda: 0, size=lambda: 2, _register_backend=lambda *_: None)
    made._set_group_name = lambda name: setattr(made, "named", name)
    made._set_group_desc = lambda text: setattr(made, "described", text)
    backend = SimpleNamespace(name=lambda: "nccl", options=SimpleNamespace(_timeout=limit))
    parent = SimpleNamespace(rank=lambda: 2, size=lambda: 4, _get_backend=lambda device: backend)

    def process_group_nccl(store, rank, size, options):
        made.options = options

    process_group_nccl.Options = SimpleNamespace
    monkeypatch.setattr(dist, "ProcessGroupNCCL", process_group_nccl, raising=False)
    monkeypatch.setattr(private_group, "store_of", lambda _: dist.HashStore())
    group_class = lambda store, rank, size: made  # noqa: E731
    group_class.BackendType = dist.ProcessGroup.BackendType
    monkeypatch.setattr(dist, "ProcessGroup", group_class)
    private_group.private_group(parent, LIMIT, "a life/1", (2, 3), torch.device("cuda"))
    return made


def test_a_private_group_of_nccl_has_its_parents_time_limit_and_a_name(monkeypatch):
    made = made_of_nccl(monkeypatch, timedelta(minutes=7))
    assert made.options._timeout == timedelta(minutes=7)
    assert made.named == "gradwire/a life/1"
    assert made.described == "gradwire: ranks 2, 3"


class Work:
    """A collective that ends with `error`, or well, after so many slices of waiting."""

    def __init__(self, slices, error=None):
        self.slices, self.error, self.waits = slices, error, 0

    def wait(self, limit):
        self.waits += 1
        if self.slices > 0:
            time.sleep(limit.total_seconds())
            self.slices -= 1
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self):
        return self.slices <= 0


@pytest.fixture
def short_looks(monkeypatch):
    monkeypatch.setattr(process_group, "CHECK_EVERY", timedelta(seconds=0.02))


def test_a_reply_that_comes_while_a_rank_looks_around_is_no_failure(short_looks):
    looks, reply = [], torch.ones(2)
    pending = process_group.GroupPending(Work(slices=3), reply, check=lambda: looks.append(1))
    assert pending.wait(timedelta(seconds=5)) is reply
    assert len(looks) == 3


def test_a_collective_that_fails_is_not_asked_again(short_looks):
    looks, work = [], Work(slices=0, error="Connection closed by peer")
    with pytest.raises(RuntimeError, match="closed by peer"):
        process_group.GroupPending(work, torch.ones(2), check=lambda: looks.append(1)).wait(timedelta(seconds=5))
    assert (work.waits, len(looks)) == (1, 1)


def test_an_error_that_is_kept_keeps_no_connection_open(short_looks):
    """Else ranks that wait for this one, and not for the one that died, would not learn of it."""
    pending = process_group.GroupPending(Work(slices=0, error="Connection closed by peer"), torch.ones(2))
    connection = weakref.ref(pending.work)
    with pytest.raises(RuntimeError) as kept:
        pending.wait(timedelta(seconds=5))
    pending.abandon()
    assert connection() is None, f"{kept.value} is kept, and the work with it"


def test_the_time_limit_of_a_wait_in_slices_is_the_whole_one(short_looks):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        process_group.GroupPending(Work(slices=1000), torch.ones(2)).wait(timedelta(seconds=0.1))
    assert 0.1 <= time.monotonic() - began < 15
