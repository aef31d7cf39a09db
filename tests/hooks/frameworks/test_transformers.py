"""GradwireCallback in Hugging Face's Trainer: compressed, all ranks' states in its checkpoints, resumed in the same bits."""

import signal
import time
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from ..given import same
from ..local_sgd.test_threads import Gate
from .launched import BATCH, SPEC, STEPS, TIMEOUT, compiled_too, data, dense_bytes, launched, needing, network, numbers

HAS_JIT = find_spec("transformers") is not None and find_spec("transformers.trainer_jit_checkpoint") is not None


class Regression(nn.Module):
    """What the Trainer expects of a model: a loss when it is given labels."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, inputs, labels):
        return {"loss": mse_loss(self.network(inputs), labels)}


def rows(world_size):
    return [{"inputs": inputs, "labels": labels} for inputs, labels in data(world_size)]


def compressing(trainer):
    from gradwire.transformers import GradwireCallback

    return GradwireCallback(trainer, SPEC)


def by_local_steps(**options):
    """What makes the callback of a Trainer."""

    def made(trainer):
        from gradwire.transformers import LocalStepsCallback

        return LocalStepsCallback(trainer, **{"every": 2, "fragments": 1, **options})

    return made


def trainer_of(world_size, folder, *, compiled=False, scaler=None, callback=compressing, **options):
    """A Trainer of two epochs of three steps, and gradwire's callback in it."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        learning_rate=0.01,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        torch_compile=compiled,
        torch_compile_backend="eager" if compiled else None,
        **{"save_steps": STEPS, **options},
    )
    trainer = Trainer(Regression(), arguments, train_dataset=rows(world_size), eval_dataset=rows(world_size))
    trainer.accelerator.scaler = scaler
    trainer.add_callback(made := callback(trainer))
    return trainer, made


def trained(world_size, folder, *, checkpoint=None, at_epochs=None, **options):
    """Two epochs of three steps; `at_epochs(trainer, handle)` is called when one begins."""
    from transformers import TrainerCallback

    trainer, callback = trainer_of(world_size, folder, **options)

    class AtEpochs(TrainerCallback):
        def on_epoch_begin(self, *_, **__):
            at_epochs(trainer, callback.compression)

    if at_epochs is not None:
        trainer.add_callback(AtEpochs())
    trainer.train(resume_from_checkpoint=checkpoint)
    return numbers(trainer.model), getattr(callback, "compression", None), trainer.state.log_history


def train(rank, world_size, folder, compiled):
    with launched(rank, world_size):
        whole, handle, logged = trained(world_size, folder, compiled=compiled)
        checkpoint = f"{folder}/checkpoint-{STEPS}"
        resumed, again, _ = trained(world_size, folder, compiled=compiled, checkpoint=checkpoint)
    saved = torch.load(f"{checkpoint}/gradwire.pt", weights_only=True)["ranks"]
    payloads = [entry["gradwire/payload_bytes"] for entry in logged if "gradwire/payload_bytes" in entry]
    states = [state["rank"] for state in saved], handle.state_dict(), again.state_dict()
    steps = handle.stats().steps
    handle.close()
    again.close()
    return whole, resumed, payloads, steps, states


@needing("transformers", "accelerate")
@compiled_too
def test_trainer_trains_compressed_and_resumes_in_the_same_bits(ranks, tmp_path, compiled):
    answers = ranks.run(train, 2, str(tmp_path), compiled, timeout=TIMEOUT)
    for whole, resumed, payloads, steps, (saved_ranks, state, state_again) in answers:
        assert same(whole, answers[0][0])
        assert same(whole, resumed)
        assert steps == 2 * STEPS
        assert saved_ranks == [0, 1]
        assert same(state, state_again)
        assert len(payloads) == 2 * STEPS
        assert all(0 < payload < dense_bytes() / 5 for payload in payloads)


def on_sigterm(rank, world_size, folder):
    """Parameters after a training, and after one that goes on from a checkpoint that was saved as on SIGTERM."""
    from transformers import TrainerCallback

    class Requests(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == STEPS:
                manager().is_checkpoint_requested = True  # as some seconds after the signal

    def manager():
        return next(each.jit_manager for each in jit.callback_handler.callbacks if hasattr(each, "jit_manager"))

    with launched(rank, world_size):
        whole, handle, _ = trained(world_size, f"{folder}/whole")
        options = {"enable_jit_checkpoint": True, "save_strategy": "no"}
        jit = trainer_of(world_size, f"{folder}/jit", **options)[0]
        jit.callback_handler.callbacks.insert(0, Requests())
        jit.train()
        resumed, again, _ = trained(world_size, f"{folder}/jit", checkpoint=f"{folder}/jit/checkpoint-{STEPS}")
    states = handle.state_dict(), again.state_dict()
    handle.close()
    again.close()
    return whole, resumed, states, jit.state.global_step


@needing("transformers", "accelerate")
@pytest.mark.skipif(not HAS_JIT, reason="a Trainer without enable_jit_checkpoint")
def test_a_checkpoint_on_sigterm_has_the_state_of_each_rank(ranks, tmp_path):
    for whole, resumed, (state, state_again), stopped in ranks.run(on_sigterm, 2, str(tmp_path), timeout=TIMEOUT):
        assert STEPS <= stopped < 2 * STEPS
        assert same(whole, resumed)
        assert same(state, state_again)


def locally(rank, world_size, folder):
    """Parameters after local SGD, whole and resumed; the logged sites; whether the trainings ended alike on all ranks."""
    callback = by_local_steps(compressor="int8", overlap=False)
    with launched(rank, world_size):
        whole, _, logged = trained(world_size, folder, callback=callback)
        resumed, _, _ = trained(world_size, folder, callback=callback, checkpoint=f"{folder}/checkpoint-{STEPS}")
    return whole, resumed, [entry["gradwire/round"] for entry in logged if "gradwire/round" in entry]


@needing("transformers", "accelerate")
def test_trainer_trains_by_local_steps_with_a_checkpoint(ranks, tmp_path):
    answers = ranks.run(locally, 2, str(tmp_path), timeout=TIMEOUT)
    for whole, resumed, rounds in answers:
        assert same(whole, answers[0][0])
        assert same(resumed, answers[0][1])
        assert rounds[-1] == STEPS


def broken_off(rank, world_size, folder):
    """What local SGD leaves behind after a training that raised, and parameters after a second training."""
    from transformers import TrainerCallback

    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if breaks and state.global_step == STEPS:
                raise ValueError("broken off")

    with launched(rank, world_size):
        trainer, callback = trainer_of(world_size, folder, callback=by_local_steps(), save_strategy="no")
        trainer.add_callback(Breaks())
        breaks = True
        with pytest.raises(ValueError, match="broken off"):
            trainer.train()
        left = callback.local is None, len(trainer.optimizer.optimizer._optimizer_step_post_hooks)
        breaks = False
        trainer.train()
    return left, numbers(trainer.model)


@needing("transformers", "accelerate")
def test_a_training_by_local_steps_that_breaks_off_leaves_no_hook_behind(ranks, tmp_path):
    answers = ranks.run(broken_off, 2, str(tmp_path), timeout=TIMEOUT)
    for left, parameters in answers:
        assert left == (True, 0)
        assert same(parameters, answers[0][1])


def interrupted(rank, world_size, folder):
    """The seconds in which training ends by Ctrl-C while a round hangs; what is left of it; parameters after another one."""
    from transformers import TrainerCallback

    gate, pressed = Gate(), []

    class Presses(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == STEPS - 1 and not pressed:
                gate.open.clear()

        def on_step_end(self, args, state, control, **_):
            if state.global_step == STEPS and not pressed:
                pressed.append(time.monotonic())
                signal.raise_signal(signal.SIGINT)

    with launched(rank, world_size):
        at_the_gate = by_local_steps(every=STEPS, transport=gate)
        trainer, callback = trainer_of(world_size, folder, callback=at_the_gate, save_strategy="no")
        trainer.add_callback(Presses())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        seconds = time.monotonic() - pressed[0]
        left = callback.local, len(trainer.optimizer.optimizer._optimizer_step_post_hooks)
        gate.open.set()
        trainer.train()
    return seconds, left, numbers(trainer.model)


@needing("transformers", "accelerate")
def test_ctrl_c_in_the_middle_of_a_round_ends_training_without_a_wait(ranks, tmp_path):
    answers = ranks.run(interrupted, 2, str(tmp_path), timeout=TIMEOUT)
    for seconds, left, parameters in answers:
        assert seconds < 10  # a round waits a minute at the gate
        assert left == (None, 0)
        assert same(parameters, answers[0][2])


def best_loaded(rank, world_size, folder):
    """Parameters after local SGD at whose end the Trainer loads the best model, and those of that checkpoint."""
    from safetensors.torch import load_file

    evaluation = {"eval_strategy": "epoch", "save_strategy": "epoch", "prediction_loss_only": True}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    with launched(rank, world_size):
        trainer, _ = trainer_of(world_size, folder, callback=by_local_steps(outer="diloco"), **evaluation, **best)
        trainer.train()
    saved = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    return dict(trainer.model.named_parameters()), saved


@needing("transformers", "accelerate")
def test_the_best_model_that_a_trainer_loads_at_the_end_stays_as_it_is(ranks, tmp_path):
    for parameters, saved in ranks.run(best_loaded, 2, str(tmp_path), timeout=TIMEOUT):
        assert all(torch.equal(parameters[name], each) for name, each in saved.items())


def evaluated(rank, world_size, folder):
    """What training after an evaluation raises, and the bytes of a step where the advice is followed, in both ways."""
    options = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no", "prediction_loss_only": True}
    payloads = []
    with launched(rank, world_size):
        first, callback = trainer_of(world_size, folder, **options)
        first.evaluate()
        with pytest.raises(RuntimeError) as caught:
            first.train()
        first.model._is_accelerate_prepared = False
        second, other = trainer_of(world_size, folder, eval_on_start=True, **options)
        for made, each in ((first, callback), (second, other)):
            made.train()
            payloads.append(each.compression.stats().last.traffic.payload_bytes)
            each.compression.close()
    return str(caught.value), payloads


@needing("transformers", "accelerate")
def test_training_after_an_evaluation_is_refused_and_what_the_message_advises_works(ranks, tmp_path):
    for message, payloads in ranks.run(evaluated, 2, str(tmp_path), timeout=TIMEOUT):
        assert "when evaluate() or predict() runs before train()" in message
        assert "eval_on_start=True" in message
        assert "_is_accelerate_prepared = False" in message
        assert all(0 < payload < dense_bytes() / 5 for payload in payloads)
