"""Changes of one line that break gradwire, and the tests that must fail where one is made."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """`line` of `file`, without its indentation, becomes `changed`; then one of `tests` fails."""

    what: str
    file: str
    line: str
    changed: str
    tests: str

    def made_in(self, root):
        """The text of the file before, and after. Raises ValueError unless the line is there once."""
        text = (root / self.file).read_text("utf-8")
        lines = text.splitlines(keepends=True)
        places = [place for place, line in enumerate(lines) if line.strip() == self.line]
        if len(places) != 1:
            raise ValueError(
                f"{self.file} has the line {self.line!r} {len(places)} times, not once: correct {self.what!r}"
            )
        lines[places[0]] = lines[places[0]].replace(self.line, self.changed)
        return text, "".join(lines)


MUTANTS = [
    Mutant(
        "a handle that loads a state does not forget the loss scale",
        "ddp_core/handle.py",
        "self._loss_scale.forget()",
        "pass",
        "tests/hooks/laws/test_loss_scale.py",
    ),
    Mutant(
        "a new loss scale changes residuals the wrong way round",
        "ddp_core/memory/loss_scale.py",
        "self._rescale(scale / before)",
        "self._rescale(before / scale)",
        "tests/ddp_core/memory/test_loss_scale.py",
    ),
    Mutant(
        "a step that is not finite leaves its traces in the residual",
        "compress/state/tree.py",
        "if not keep:",
        "if False:",
        "tests/hooks/laws/test_undone_steps.py",
    ),
    Mutant(
        "another number of ranks owes the sum of residuals, not their mean",
        "ddp_core/memory/checkpoint.py",
        "mean = {name: held[name] / len(ordered) for name in held}",
        "mean = dict(held)",
        "tests/hooks/laws/test_state.py -k other_ranks",
    ),
    Mutant(
        "a state with a parameter in two buckets is loaded",
        "ddp_core/memory/checkpoint.py",
        "if len(set(listed := [name for names in buckets for name in names])) < len(listed):",
        "if False and (listed := []):",
        "tests/hooks/laws/test_bad_states.py",
    ),
    Mutant(
        "a handle that nobody calls is noticed much later",
        "hooks/torch_ddp_checks.py",
        "if self._begun == ENOUGH:",
        "if self._begun == 4 * ENOUGH:",
        "tests/hooks/test_mistaken_wrapping.py -k 'nobody_calls or no_sync'",
    ),
    Mutant(
        "a step of the optimizer is not noticed: a false warning",
        "ddp_core/averaging/step_checks.py",
        "if stepped or not (before and all(now.cleared(then) for now, then in pairs) and counts()):",
        "if not (before and all(now.cleared(then) for now, then in pairs) and counts()):",
        "tests/hooks/test_thrown_away.py -k changes_no_number",
    ),
    Mutant(
        "ranks that have swapped alone go on",
        "ddp_core/transport/setup_agreement.py",
        'if not store.check([f"{other}/begun"]) or int(store.get(f"{other}/begun")) > self.step:',
        "if True:",
        "tests/hooks/test_some_ranks_only.py",
    ),
    Mutant(
        "the mean of sparse gradients is their sum",
        "ddp_core/buckets/sparse.py",
        "grad = (grad / world_size).coalesce()",
        "grad = grad.coalesce()",
        "tests/ddp_core/buckets/test_sparse.py tests/ddp_core/behaviour/test_sparse_rows.py",
    ),
    Mutant(
        "local SGD forgets its momentum's decay",
        "hooks/local_sgd/outer.py",
        "momentum.mul_(self.momentum).add_(difference)",
        "momentum.add_(difference)",
        "tests/hooks/local_sgd/test_outer.py",
    ),
    Mutant(
        "local SGD averages a fragment too seldom",
        "hooks/local_sgd/local_steps.py",
        "self._due, self._paced = begun + self.spacing, (time.perf_counter(), self.steps)",
        "self._due, self._paced = begun + self.every, (time.perf_counter(), self.steps)",
        "tests/hooks/local_sgd/test_local_steps.py -k 'fragment or every or diloco or oracle or same'",
    ),
    Mutant(
        "a frame between sites may be repeated",
        "hooks/internet/link.py",
        'made = hmac.new(key, COUNTER.pack(counter) + head, "sha256")',
        'made = hmac.new(key, head, "sha256")',
        "tests/hooks/internet/test_attacks.py -k 'changed_repeated'",
    ),
    Mutant(
        "the weights of sites do not count",
        "hooks/local_sgd/reports.py",
        "return [weight / usual for weight in weights]",
        "return [1.0 for weight in weights]",
        "tests/hooks/local_sgd/test_outliers.py -k average_by_weight",
    ),
    Mutant(
        "a model goes to sites that have it",
        "hooks/local_sgd/rounds.py",
        "takers = [site for site, each in enumerate(digests) if each != digest]",
        "takers = [site for site in range(len(digests)) if site != source]",
        "tests/hooks/local_sgd/test_catching_up.py -k lacks_it",
    ),
    Mutant(
        "a site ahead of the majority is not refused",
        "hooks/internet/standing.py",
        "elif claim.round > agreed + 1 and site not in apart:",
        "elif claim.round > agreed + 1000 and site not in apart:",
        "tests/hooks/internet/test_standing.py",
    ),
    Mutant(
        "a server of two-shot compression keeps no residual",
        "compress/algorithms/adapters.py",
        "held = None if server is None else server.open()",
        "held = None",
        "tests/compress/algorithms -k 'onebit or adapters or quantized'",
    ),
    Mutant(
        "random rounding draws the same numbers in every step",
        "compress/algorithms/adapters.py",
        "first = state.step.value << 33",
        "first = 0",
        "tests/compress/baselines/test_unbiased.py tests/compress/algorithms/test_quantized.py",
    ),
    Mutant(
        "PowerSGD begins each step with the first Q",
        "compress/algorithms/powersgd.py",
        "following.copy_(q)",
        "following.copy_(first)",
        "tests/compress/algorithms/test_powersgd.py",
    ),
    Mutant(
        "PowerSGD keeps a residual of what it sends whole",
        "compress/algorithms/powersgd.py",
        "torch._foreach_zero_(after)",
        "pass",
        "tests/compress/algorithms/test_powersgd.py tests/compress/test_laws.py -k powersgd",
    ),
    Mutant(
        "topk sends one element too few",
        "compress/algorithms/topk.py",
        "return min(length, self.k or math.ceil(self.ratio * length))",
        "return min(length, self.k or max(1, math.ceil(self.ratio * length) - 1))",
        "tests/compress/test_ratios.py tests/compress/test_dry_run.py",
    ),
    Mutant(
        "a capped compressor averages over one rank",
        "compress/baselines/capped.py",
        "wide.div_(len(rows))",
        "pass",
        "tests/compress/baselines/test_capped.py",
    ),
    Mutant(
        "QSGD with error feedback does not contract",
        "compress/baselines/qsgd.py",
        "share = 1 / (1 + self.variance(blocks.shape[1])) if fed_back else 1.0",
        "share = 1.0",
        "tests/compress/baselines/test_unbiased.py -k contraction",
    ),
    Mutant(
        "the momentum of a worker does not decay",
        "compress/feedback/worker_momentum.py",
        "torch.add(grad, before, alpha=self.momentum, out=after)",
        "torch.add(grad, before, out=after)",
        "tests/compress/feedback/test_variants.py",
    ),
    Mutant(
        "a block holds elements of two parameters",
        "compress/algorithms/cuts.py",
        "return all(first % block == 0 for first, size in _spans(sizes) if size)",
        "return True",
        "tests/compress/test_laws.py -k 'smaller_average'",
    ),
    Mutant(
        "a row of payload begins at another block than its table says",
        "compress/algorithms/cuts.py",
        "first, place = first + size, place - blocks",
        "first, place = first + blocks * block, place - blocks",
        "tests/compress/algorithms/test_cuts.py",
    ),
    Mutant(
        "threads that differ between ranks are not told",
        "ddp_core/averaging/same_kernels.py",
        'threads = any(each["varies"] for each in ranks) or by_torch',
        "threads = False",
        "tests/ddp_core/averaging/test_same_kernels.py -k threads",
    ),
    Mutant(
        "buffers that forwards have changed are set to an average that travelled",
        "hooks/local_sgd/local_steps.py",
        "if part is self._parts[-1] and not self.overlap:  # else forwards have changed them since they left",
        "if part is self._parts[-1]:",
        "tests/hooks/local_sgd/test_buffers.py",
    ),
    Mutant(
        "residuals of our DDP lie as parameters do now, not as buckets",
        "ddp_core/averaging/averager.py",
        "return bucket.views",
        "return parameters",
        "tests/hooks/test_memory_formats.py -k add_up",
    ),
    Mutant(
        "torch reads an average in another memory format than it lies in",
        "ddp_core/buckets/lying.py",
        "here.copy_(there.clone())",
        "pass",
        "tests/hooks/test_memory_formats.py -k add_up",
    ),
    Mutant(
        "a state in another memory format is loaded as it lies",
        "ddp_core/memory/checkpoint.py",
        "if list(there) == here or name not in parameters:",
        "if True:",
        "tests/hooks/test_memory_formats.py -k loaded",
    ),
    Mutant(
        "ranks of tensor parallelism have one key",
        "hooks/fsdp/state.py",
        'return ", ".join(filter(None, (f"rank {rank} of {ranks}", part)))',
        'return f"rank {rank} of {ranks}"',
        "tests/hooks/laws/test_tensor_parallel.py -k FSDP2",
    ),
    Mutant(
        "weights that were swapped in are gathered as differences alone",
        "compress/shards/weights.py",
        "if not steps and bool(gathered[:, -1].any()):",
        "if False:",
        "tests/hooks/fsdp/test_differences.py -k swapped_in",
    ),
    Mutant(
        "torch divides averages of replicas before they are there",
        "hooks/fsdp/replicas.py",
        "at_once = divided or module.reads_gradients(reduce_output.dtype)",
        "at_once = divided",
        "tests/hooks/fsdp/test_replicas.py -k torch_divides",
    ),
    Mutant(
        "an average that is averaged again is not told",
        "ddp_core/averaging/step_checks.py",
        "elif averaged:",
        "elif False:",
        "tests/hooks/test_averaged_again.py",
    ),
    Mutant(
        "ranks compare the values of their last forward, which SAM has moved",
        "ddp_core/averaging/starting_values.py",
        "self._first = self._first or self._last",
        "self._first = self._last",
        "tests/hooks/test_starting_values.py -k ascent",
    ),
    Mutant(
        "a minority of sites waits a third of the limit",
        "hooks/internet/gathering.py",
        "return any(now - each.since >= PHASES * each.phase for each in came or gone)",
        "return any(now - each.since >= each.phase for each in came or gone)",
        "tests/hooks/internet/test_gathering.py",
    ),
    Mutant(
        "the grace of a majority begins with the first site",
        "hooks/internet/gathering.py",
        "most = here[len(group) // 2]  # with it they were more than half",
        "most = here[0]",
        "tests/hooks/internet/test_gathering.py",
    ),
    Mutant(
        "the end of a minority ends the training of the others",
        "hooks/internet/gathering.py",
        "if 0 < meeting == self.majority:",
        "if meeting:",
        "tests/hooks/internet/test_gathering.py",
    ),
    Mutant(
        "the word of a site is not bounded",
        "hooks/local_sgd/reports.py",
        "return [min(number, FAR * usual) for number, usual in zip(numbers, others, strict=True)]",
        "return list(numbers)",
        "tests/hooks/local_sgd/test_reports.py",
    ),
    Mutant(
        "an average above what sites report counts",
        "hooks/local_sgd/rounds.py",
        "good = finite and norm <= most",
        "good = finite",
        "tests/hooks/local_sgd/test_members.py -k 'sends_more'",
    ),
    Mutant(
        "a parameter joins with numbers far beyond the model",
        "hooks/local_sgd/joining.py",
        "bad = [name for name, value in values.items() if not bool((value.abs() <= most).all())]",
        "bad = []",
        "tests/hooks/local_sgd/test_members.py -k 'far_beyond'",
    ),
    Mutant(
        "strangers of one network push out those of another",
        "hooks/internet/link.py",
        "task = secrets.choice([each for each, network in self._strangers.items() if counts[network] == most])",
        "task = next(iter(self._strangers))",
        "tests/hooks/internet/test_dials.py -k 'strangers'",
    ),
    Mutant(
        "a dial tries one address of a name alone",
        "hooks/internet/link.py",
        "host, port, limit=BUFFER, ssl=secret.dialing, happy_eyeballs_delay=min(NEXT_ADDRESS, patience / 4)",
        "host, port, limit=BUFFER, ssl=secret.dialing",
        "tests/hooks/internet/test_dials.py -k 'swallows'",
    ),
    Mutant(
        "a rank that ends before its first bucket is waited for",
        "ddp_core/transport/lost_ranks.py",
        "_know(group, _announced(store, ranks))",
        "pass",
        "tests/ddp_core/transport/test_rank_messages.py -k 'before_its_first'",
    ),
    Mutant(
        "a path is taken for the secret itself",
        "hooks/internet/secret.py",
        "if _is_path(made.text) or PRIVATE in made.text:",
        "if PRIVATE in made.text:",
        "tests/hooks/internet/test_secret.py -k 'path or file_that'",
    ),
    Mutant(
        "a name forges lines in the logs of others",
        "hooks/internet/records.py",
        "return isinstance(value, str) and len(value) <= TEXT and value.isprintable()",
        "return isinstance(value, str) and len(value) <= TEXT",
        "tests/hooks/internet/test_attacks.py -k 'cannot_be_is_refused'",
    ),
    Mutant(
        "a state with other buffers is loaded",
        "hooks/local_sgd/saved.py",
        "if not isinstance(buffers, Tensor) or (buffers.shape, buffers.dtype) != (here.shape, here.dtype):",
        "if False:",
        "tests/hooks/local_sgd/test_saved.py",
    ),
    Mutant(
        "a step ends with the backward of a reentrant checkpoint",
        "hooks/torch_steps.py",
        "backward.steps = steps",
        "Variable._execution_engine.queue_callback(steps.all_sent)",
        "tests/hooks/test_torch_steps.py",
    ),
    Mutant(
        "a save waits for gradients that nobody awaits any more",
        "ddp_core/engine/engine.py",
        "return not all(task.left for task in self._live)",
        "return bool(self._live)",
        "tests/hooks/fsdp/test_state.py -k broke_off",
    ),
    Mutant(
        "an evaluation in inference mode leaves tensors that no step can write to",
        "hooks/fsdp/communication.py",
        "OUTSIDE_INFERENCE = torch.inference_mode(mode=False)  # or steps could not write to what an evaluation has made",
        "OUTSIDE_INFERENCE = torch.no_grad()",
        "tests/hooks/fsdp/test_differences.py -k inference",
    ),
    Mutant(
        "ranks that announce themselves late are not watched",
        "ddp_core/transport/lost_ranks.py",
        "if group not in _met:  # ranks may announce themselves at any time",
        "if group not in _met and look == PATIENCE:",
        "tests/ddp_core/transport/test_lost_ranks.py -k late",
    ),
]
