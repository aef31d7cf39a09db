"""Where a step on a GPU goes: functions of the host, then kernels of the device, for each case.

    python gpu_profile.py host torch:none@1 gradwire:powersgd:rank=4@1 --rows 30

Workloads and cases are those of gpu_step.py. Of the host a profiler counts all Python functions, which it slows down:
compare counts and shares, not milliseconds with those of gpu_step.py.

In a clone that is not installed, put its root on PYTHONPATH, as `make gpu` does.
"""

import cProfile
import os
import pstats

import gpu_step
import torch
import torch.distributed as dist
from driver import parser_of
from torch.profiler import ProfilerActivity, profile

STEPS = 10


def profiled(case: gpu_step.Case, inputs: torch.Tensor, rows: int) -> None:
    """Print both profiles of some steps."""
    case.build_and_warm(inputs)
    torch.autograd.set_multithreading_enabled(False)  # or hooks run on a thread that the profiler does not see
    functions = cProfile.Profile()
    functions.enable()
    case._run(inputs, STEPS)
    functions.disable()
    print(f"\n=== {case.name}: {STEPS} steps on the host")
    pstats.Stats(functions).sort_stats("tottime").print_stats(rows)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        case._run(inputs, STEPS)
        torch.cuda.synchronize()
    kernels = [each for each in found.key_averages() if each.self_device_time_total and not each.self_cpu_time_total]
    kernels.sort(key=lambda each: -each.self_device_time_total)
    print(f"=== {case.name}: microseconds a step on the device, calls a step")
    for each in kernels[:rows]:
        print(f"{each.self_device_time_total / STEPS:10.1f} {each.count / STEPS:7.1f}  {each.key[:90]}")
    torch.autograd.set_multithreading_enabled(True)
    case.end_round()


def main() -> None:
    """Profile the cases one after the other in this process."""
    parser = parser_of(__doc__)
    parser.add_argument("bound", choices=gpu_step.WORKLOADS)
    parser.add_argument("cases", nargs="+", metavar="WHAT@MEGABYTES")
    parser.add_argument("--rows", type=int, default=25)
    arguments = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29508")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    workload = gpu_step.WORKLOADS[arguments.bound]
    inputs = workload.inputs()
    for name in arguments.cases:
        profiled(gpu_step.Case(name, workload), inputs, arguments.rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
