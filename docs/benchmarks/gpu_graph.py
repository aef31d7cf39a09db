"""What CUDA graphs would spare the host: a bucket's arithmetic launched kernel by kernel, and replayed as graphs.

    python gpu_graph.py int8 onebit --json graphs.json

A bucket of four layers of 256, as the workload `host` of gpu_step.py has. Between two rounds of communication lies one
graph: so a program of two rounds has three. Nothing is sent: each reply is this rank's own request. Both ways take turns,
from the same numbers, and must give the same bits. Times are the host's until all is queued.

In a clone that is not installed, put its root on PYTHONPATH, as `make gpu` does.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from driver import about, parser_of, write_results
from torch import Tensor

import gradwire
from gradwire.compress import Layout
from gradwire.compress.protocol.requests import AllGather, Gather, ReduceScatter, Request, Scatter, next_request
from gradwire.compress.state.gauge import gauges

CASES = ("bf16", "int8", "int4", "onebit", "topk:ratio=0.01", "powersgd:rank=4")
SHAPES = ((256, 256), (256,)) * 4
WARM, TURNS, QUEUED = 3, 50, 10  # runs before a capture; turns; buckets of a turn


def reply_to(request: Request) -> Tensor:
    """Return what a rank alone gets."""
    tensor = request.tensor
    if isinstance(request, AllGather | Gather):
        return tensor.unsqueeze(0)
    return tensor[0] if isinstance(request, ReduceScatter | Scatter) else tensor


class Bucket:
    """A bucket's gradient, its compressor and its state."""

    def __init__(self, spec: str) -> None:
        names = tuple(map(str, range(len(SHAPES))))
        self.layout = Layout(names, SHAPES, torch.float32, torch.device("cuda", 0))
        self.compressor = gradwire.compressor(spec)
        self.state = self.compressor.init(self.layout)
        self.given = torch.randn(self.layout.numel, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        self.grad = self.given.clone()
        for gauge in gauges(self.state):
            gauge.begin = lambda grad, held: None  # its samples are not of every step

    def launch(self, around: Callable[[Callable[[], None]], None] = lambda stage: stage()) -> Tensor:
        """Run the program. `around`: what each of its stages is given to."""
        program, reply, found = self.compressor.reduce(self.grad, self.state), None, [None, None]

        def stage() -> None:
            found[:] = next_request(program, reply)

        while found[1] is None:
            around(stage)
            reply = None if found[0] is None else reply_to(found[0])
        return found[1]

    def captured(self) -> tuple[list[torch.cuda.CUDAGraph], Tensor]:
        """Return a graph for each stage, and where they leave the average."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def capture(stage: Callable[[], None]) -> None:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=graphs[0].pool() if len(graphs) > 1 else None):
                stage()

        return graphs, self.launch(capture)


def queued_us(run: Callable[[], object]) -> float:
    """Microseconds of the host for a bucket, of some one behind the other."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(QUEUED):
        run()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * taken / QUEUED


def compared(spec: str) -> dict[str, float | int | str | bool]:
    """Both ways of a compressor: the medians of their turns, and whether their averages have the same bits."""
    launched, replayed = Bucket(spec), Bucket(spec)
    for bucket in (launched, replayed):
        for _ in range(WARM):
            bucket.grad.copy_(bucket.given)
            bucket.launch()
    torch.cuda.synchronize()
    graphs, average = replayed.captured()

    def replay() -> None:
        for graph in graphs:
            graph.replay()

    for bucket in (launched, replayed):
        bucket.grad.copy_(bucket.given)
    expected = launched.launch().clone()
    replay()
    same = torch.equal(average, expected)
    turns = [(queued_us(launched.launch), queued_us(replay)) for _ in range(TURNS)]
    one, other = map(statistics.median, zip(*turns, strict=True))
    return {"case": spec, "launched_us": one, "replayed_us": other, "graphs": len(graphs), "same_bits": same}


def main() -> int:
    """Compare both ways for each compressor; 1 where bits differ."""
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="COMPRESSOR")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [compared(spec) for spec in arguments.cases]
    for row in rows:
        told = (
            "{case:20} {launched_us:7.0f} us launched {replayed_us:7.0f} us as {graphs} graphs, same bits: {same_bits}"
        )
        print(told.format(**row))
    write_results(arguments.json, {**about("cuda"), "cases": rows})
    return 0 if all(row["same_bits"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
