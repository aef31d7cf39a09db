"""Changes that break what ranks compare, and what they are told."""

from .mutant import Mutant

AMONG_RANKS = [
    Mutant(
        "training does not compare the threads that a compressor's bits depend on",
        "ddp_core/averaging/averager.py",
        "varies = varies_with_threads(self.memory.compressor, operations, dtypes)",
        "varies = False",
        "tests/ddp_core/averaging/test_same_kernels.py -k unlike_processors",
    ),
    Mutant(
        "training does not compare threads where torch multiplies float64",
        "ddp_core/averaging/averager.py",
        "dtypes = {flat.dtype, *(each.dtype.to_real() for each in self.names)}",
        "dtypes = {flat.dtype}",
        "tests/ddp_core/averaging/test_same_kernels.py -k unlike_processors",
    ),
    Mutant(
        "local SGD does not compare threads where torch multiplies float64",
        "hooks/local_sgd/local_steps.py",
        "dtypes = {part.layout.dtype for part in self._parts}",
        "dtypes = set()",
        "tests/hooks/local_sgd/test_same_kernels.py -k once_they_synchronize",
    ),
    Mutant(
        "vector instructions are not compared",
        "ddp_core/averaging/same_kernels.py",
        'threads = {"threads": str(torch.get_num_threads()), "vectors": torch.backends.cpu.get_cpu_capability()}',
        'threads = {"threads": str(torch.get_num_threads())}',
        "tests/ddp_core/averaging/test_same_kernels.py -k unlike_processors",
    ),
    Mutant(
        "ranks compare no values after a load",
        "ddp_core/averaging/starting_values.py",
        "self.due, self._first, self._last = True, {}, {}",
        "pass",
        "tests/hooks/test_starting_values.py -k load_on",
    ),
    Mutant(
        "a rank that is alone waits much longer than the limit of its handle",
        "ddp_core/transport/swap_agreement.py",
        "await_all(transport.group, HERE, REMEDY, limit)",
        "await_all(transport.group, HERE, REMEDY, 12 * limit)",
        "tests/hooks/test_starting_values.py -k attaches_alone",
    ),
    Mutant(
        "the warning of averaged losses names no compressor without error feedback",
        "ddp_core/averaging/step_checks.py",
        '"without error feedback: int8, or error_feedback=false"',
        '"without it"',
        "tests/hooks/test_averaged_again.py -k losses",
    ),
    Mutant(
        "FSDP2 does not tell of averages that are thrown away",
        "ddp_core/averaging/shard_averager.py",
        "self.discarded.look()  # torch has put the gradients into their places",
        "pass",
        "tests/hooks/laws/test_thrown_away.py",
    ),
    Mutant(
        "averages of replicas that are thrown away are not told",
        "ddp_core/averaging/averager.py",
        "if self._trained and self.discarded.parameters:",
        "if False:",
        "tests/hooks/laws/test_thrown_away.py -k replicate",
    ),
    Mutant(
        "L-BFGS is not told",
        "ddp_core/averaging/step_checks.py",
        "warnings.warn(LBFGS, stacklevel=3)",
        "pass",
        "tests/hooks/test_averaged_again.py -k lbfgs",
    ),
]
