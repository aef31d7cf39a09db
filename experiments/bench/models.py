"""The trainings of the benchmark: models at the sizes of their papers, synthetic samples, a loss."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...compress.builder.spelling import did_you_mean
from ..workloads.emulation import EmulatedModel, Trace
from ..workloads.models import SIZED, TORCHVISION, VISION, ModelConfig, build_model
from ..workloads.models.networks import MLP, ResNet18
from ..workloads.models.own import IN_FILE, own_file, own_training
from ..workloads.training import loss_of

RESNETS = VISION[:4]
PICTURE_CLASSES, CLASSES = 1000, 10
TOKENS = 128  # of a sample
BERT_WORDS = 30522
TINY_LAYERS, TINY_WIDTH = 600, 16
SMALL_IMAGE = (3, 32, 32)
Sampler: TypeAlias = Callable[[int, torch.Generator], tuple[Any, ...]]  # so many inputs and targets, or a batch


@dataclass(frozen=True)
class Task:
    """A model to train: `build` makes it on the current default device, `sample` some inputs and targets.

    `loss` takes the model and what `sample` returns. `batch_size`: the samples of a step, where that is not the user's
    choice. `fused`: the optimizer goes over the parameters once, as its time on this processor is not what is emulated.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: Sampler
    loss: Callable[..., Tensor]
    batch_size: int | None = None
    fused: bool = False

    @property
    def size(self) -> str:
        """The name and the number of parameters."""
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in self.build().parameters())
        return f"{self.name} ({count:,} parameters)"


def task_names() -> list[str]:
    """The models that there are, and torchvision:NAME."""
    return [*VISION, *OTHERS]


def task(name: str, image_size: int) -> Task:
    """Return a model by its name, or a user's by FILE.py:FUNCTION. Raises ValueError for an unknown one."""
    if IN_FILE in name:
        return _own(name)
    if name in VISION or name.startswith(TORCHVISION):
        return _pictures(name.removeprefix(TORCHVISION), image_size)
    if name in OTHERS:
        return OTHERS[name]
    hint = did_you_mean(name, task_names())
    raise ValueError(
        f"unknown model {name!r}{hint}; there are: {', '.join(task_names())}, torchvision:NAME, FILE.py:FUNCTION"
    )


def _own(place: str) -> Task:
    """The training of a user's file, which bench builds for each setting; the file is run once."""
    made = functools.cache(functools.partial(own_training, place))
    return Task(
        f"{own_file(place).name}:{place.rpartition(':')[2]}",
        lambda: copy.deepcopy(made()[0]),
        lambda count, generator: (made()[1],),
        lambda model, batch: made()[2](model, batch),
    )


def emulated_task(trace: Trace, dilate: float) -> Task:
    """The layers of a trace, which take its time: neither inputs nor targets matter."""
    return Task(
        trace.name,
        lambda: EmulatedModel(trace, dilate),
        lambda count, generator: (torch.zeros(count), torch.zeros(count)),
        lambda model, inputs, targets: model(inputs),
        trace.batch_size,
        fused=True,
    )


def _pictures(name: str, size: int) -> Task:
    def build() -> nn.Module:
        from ..workloads.models.vision import classifier  # here, since torchvision is optional

        return classifier(name, PICTURE_CLASSES)

    return Task(name, build, _images((3, size, size), PICTURE_CLASSES), loss_of)


def _images(shape: tuple[int, ...], classes: int) -> Sampler:
    """Random images of a shape, and their classes."""
    return lambda count, generator: (
        torch.rand(count, *shape, generator=generator),
        torch.randint(classes, (count,), generator=generator),
    )


def _tiny() -> nn.Module:
    """Much work a parameter for whoever handles gradients one by one."""
    return nn.Sequential(*(nn.Linear(TINY_WIDTH, TINY_WIDTH) for _ in range(TINY_LAYERS)))


def _gpt(name: str) -> Task:
    config = ModelConfig(name)

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(SIZED[name]["vocabulary"], (count, config.context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Task(name, lambda: build_model(config), sample, loss_of)


def _bert() -> nn.Module:
    """BERT-base with its masked-language output (Devlin et al. 2019), weights random."""
    from transformers import BertConfig, BertForMaskedLM  # here, since it is optional

    network: nn.Module = BertForMaskedLM(BertConfig(vocab_size=BERT_WORDS))
    return network


def _bert_sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(BERT_WORDS, (2, count, TOKENS), generator=generator)
    return tokens[0], tokens[1]


OTHERS = {
    task.name: task
    for task in (
        *map(_gpt, SIZED),
        Task("bert", _bert, _bert_sample, lambda model, inputs, targets: model(inputs, labels=targets).loss),
        Task("mlp", lambda: MLP(SMALL_IMAGE, CLASSES, width=1024, layers=4), _images(SMALL_IMAGE, CLASSES), loss_of),
        Task("tiny", _tiny, _images((TINY_WIDTH,), TINY_WIDTH), loss_of),
        Task("resnet18-cifar", lambda: ResNet18(3, CLASSES), _images(SMALL_IMAGE, CLASSES), loss_of),
    )
}
