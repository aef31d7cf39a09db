"""Lightning's other ways to gradwire: a strategy's name, a hook, Ray's strategy, Fabric, local SGD; and silent mistakes."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import gradwire

from ...ddp_core.errors import warned
from ..given import same
from .launched import BATCH, QUIET, SPEC, STEPS, TIMEOUT, data, dense_bytes, launched, needing, network, numbers
from .test_lightning import trained


def named(rank, world_size, folder):
    """What a fit by a strategy's name sends in a step, and its parameters."""
    with launched(rank, world_size):
        import gradwire.lightning

        parameters, handle, _ = trained(world_size, folder, strategy="gradwire_int8")
    return parameters, handle.stats().last.traffic.payload_bytes, handle.compressor == gradwire.compressor("int8")


@needing("pytorch_lightning")
def test_trainer_knows_the_strategy_by_name(ranks, tmp_path):
    answers = ranks.run(named, 2, str(tmp_path), timeout=TIMEOUT)
    for parameters, payload, int8 in answers:
        assert int8
        assert same(parameters, answers[0][0])
        assert 0 < payload < dense_bytes() / 2


def by_hook(rank, world_size, folder):
    """Parameters after fits with Lightning's own strategy and a hook, and with gradwire's strategy; steps of the hook.

    Lightning registers hooks on GPUs only: this strategy has it do so here.
    """
    with launched(rank, world_size):
        import pytorch_lightning.strategies.ddp as theirs

        class OnCpus(theirs.DDPStrategy):
            def _register_ddp_hooks(self):
                theirs._register_ddp_comm_hook(
                    model=self.model, ddp_comm_state=self._ddp_comm_state, ddp_comm_hook=self._ddp_comm_hook
                )
                self.handle = gradwire.handle_of(self.model)

        parameters, _, trainer = trained(world_size, folder, strategy=OnCpus(ddp_comm_hook=gradwire.comm_hook(SPEC)))
        expected, _, _ = trained(world_size, folder)
    return parameters, expected, trainer.strategy.handle.stats().steps


def in_ray(rank, world_size, folder):
    """Parameters after a fit by both strategies in one, as Ray asks for, and after one without Ray's; steps."""
    with launched(rank, world_size):
        from pytorch_lightning.strategies import DDPStrategy

        from gradwire.lightning import GradwireStrategy

        asked = []

        class RayDDPStrategy(DDPStrategy):  # as ray.train.lightning has it
            @property
            def root_device(self):
                asked.append(True)
                return torch.device("cpu")

            @property
            def distributed_sampler_kwargs(self):
                return {"num_replicas": self.world_size, "rank": self.global_rank}

        class Strategy(GradwireStrategy, RayDDPStrategy):
            pass

        parameters, handle, trainer = trained(world_size, folder, strategy=Strategy(SPEC))
        expected, _, _ = trained(world_size, folder)
    assert isinstance(trainer.strategy, RayDDPStrategy)
    assert asked
    return parameters, expected, handle.stats().steps


@needing("pytorch_lightning")
@pytest.mark.parametrize("by", [by_hook, in_ray])
def test_lightnings_strategy_with_a_hook_and_rays_with_gradwires_train_as_gradwires_alone(ranks, tmp_path, by):
    for parameters, expected, steps in ranks.run(by, 2, str(tmp_path), timeout=TIMEOUT):
        assert steps == 2 * STEPS
        assert all(torch.allclose(mine, other, atol=1e-6) for mine, other in zip(parameters, expected, strict=True))


@needing("pytorch_lightning", "ray")
def test_ray_prepares_a_trainer_with_both_strategies_in_one_and_not_one_with_gradwires_alone():
    rays = pytest.importorskip("ray.train.lightning")
    from gradwire.lightning import GradwireStrategy

    class Strategy(GradwireStrategy, rays.RayDDPStrategy):
        pass

    trainer = SimpleNamespace(strategy=Strategy(SPEC))
    assert rays.prepare_trainer(trainer) is trainer
    with pytest.raises(RuntimeError, match="Invalid strategy class"):
        rays.prepare_trainer(SimpleNamespace(strategy=GradwireStrategy(SPEC)))


def fabric(world_size, folder, *, resumed):
    """Parameters, handle and its state after steps by Fabric, of which the first ones may come from a checkpoint."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="gradwire_int4")
    fabric.launch()
    model, optimizer = fabric.setup(inside := network(), torch.optim.SGD(inside.parameters(), 0.1, momentum=0.9))
    handle = gradwire.handle_of(model)
    loader = fabric.setup_dataloaders(DataLoader(data(world_size), BATCH))
    state = {"model": model, "optimizer": optimizer, "compression": gradwire.GatheredState(handle)}
    if resumed:
        fabric.load(f"{folder}/fabric.ckpt", state)
    for epoch in range(1 if resumed else 2):
        if epoch == 1:
            fabric.save(f"{folder}/fabric.ckpt", state)
            fabric.barrier()
        for inputs, targets in loader:
            fabric.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    handle.close()
    return numbers(model), handle.stats(), handle.state_dict()


def in_fabric(rank, world_size, folder):
    with launched(rank, world_size):
        import gradwire.lightning  # noqa: F401

        return fabric(world_size, folder, resumed=False), fabric(world_size, folder, resumed=True)


@needing("lightning_fabric")
def test_fabric_knows_the_strategy_by_name_and_resumes_in_the_same_bits(ranks, tmp_path):
    for (parameters, stats, state), (resumed, _, state_again) in ranks.run(
        in_fabric, 2, str(tmp_path), timeout=TIMEOUT
    ):
        assert stats.steps == 2 * STEPS
        assert 0 < stats.last.traffic.payload_bytes < dense_bytes() / 4
        assert same(parameters, resumed)
        assert same(state, state_again)


def locally(rank, world_size, folder):
    """Parameters after local SGD, whole and resumed; rounds, steps, and the gradient's bytes."""
    with launched(rank, world_size):
        from gradwire.lightning import LocalStepsStrategy

        def strategy():
            return LocalStepsStrategy(every=2, fragments=1, compressor="int8", overlap=False)

        whole, _, trainer = trained(world_size, folder, strategy=strategy())
        local, logged = trainer.strategy.local, dict(trainer.logged_metrics)
        resumed, _, again = trained(world_size, folder, strategy=strategy(), checkpoint=f"{folder}/epoch=0.ckpt")
    return whole, resumed, (local.steps, local.round), again.strategy.local.steps, logged


@needing("pytorch_lightning")
def test_local_steps_are_a_strategy_of_lightning_with_a_checkpoint(ranks, tmp_path):
    answers = ranks.run(locally, 2, str(tmp_path), timeout=TIMEOUT)
    for whole, resumed, (steps, rounds), steps_again, logged in answers:
        assert same(whole, answers[0][0])
        assert same(resumed, answers[0][1])
        assert steps == steps_again == 2 * STEPS
        assert rounds == STEPS + 1  # one more at the end
        assert logged["gradwire/sites"] == 2


def by_hand(rank, world_size, folder, bare):
    """The warnings of a fit whose step calls backward itself."""
    with launched(rank, world_size), warned("Call self.manual_backward(loss)") as texts:
        trained(world_size, folder, manual=True, bare=bare)
    return len(texts)


@needing("pytorch_lightning")
def test_a_backward_that_lightning_does_not_see_is_warned_of_once(ranks, tmp_path):
    assert ranks.run(by_hand, 2, str(tmp_path), True, timeout=TIMEOUT) == [1, 1]
    assert ranks.run(by_hand, 2, str(tmp_path), False, timeout=TIMEOUT) == [0, 0]


@needing("pytorch_lightning")
def test_a_handle_that_was_in_spawned_processes_is_not_silently_none():
    from gradwire.lightning import GradwireStrategy

    strategy = GradwireStrategy(SPEC, start_method="spawn")
    assert strategy.compression is None
    strategy._lightning_module = network()  # as Lightning does before it starts them
    with pytest.raises(RuntimeError, match=r"start_method='spawn'.*look at trainer\.logged_metrics"):
        _ = strategy.compression


def copying(rank, world_size, folder, local):
    """The weights that an optimizer finds when it is made, of ranks that begin with other ones; those after the fit."""
    with launched(rank, world_size):
        import pytorch_lightning as pl

        from gradwire.lightning import GradwireStrategy, LocalStepsStrategy

        class Regression(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)
                self.register_buffer("scale", torch.rand(1))

            def training_step(self, batch, _):
                return self.layer(batch).mean() * self.scale

            def configure_optimizers(self):
                self.found = [each.detach().clone() for each in self.parameters()]
                return torch.optim.SGD(self.parameters(), 0.1)

        strategy = LocalStepsStrategy(every=2, fragments=1) if local else GradwireStrategy("int8")
        options = {"enable_checkpointing": False, "default_root_dir": folder, **QUIET}
        torch.manual_seed(rank)
        model = Regression()
        began = [each.detach().clone() for each in model.parameters()]
        pl.Trainer(strategy=strategy, accelerator="cpu", devices=world_size, max_steps=2, **options).fit(
            model, DataLoader(torch.ones(4 * world_size, 4), 2)
        )
    return began, model.found, numbers(model)


@needing("pytorch_lightning")
@pytest.mark.parametrize("local", [False, True], ids=["compressed", "local"])
def test_optimizers_are_made_of_the_same_model_on_all_ranks(ranks, tmp_path, local):
    (began, *first), (began_elsewhere, *second) = ranks.run(copying, 2, str(tmp_path), local, timeout=TIMEOUT)
    assert not same(began, began_elsewhere)
    assert same(first, second)
    assert same(first[0], began)
