from gradwire.experiments.workloads.emulation import Layer, Trace

LAYERS = (
    Layer("embedding", {"weight": (40, 30)}, 0.01, 0.02),
    Layer("blocks.0", {"weight": (30, 20), "bias": (30,)}, 0.03, 0.06),
    Layer("blocks.0.activation", {}, 0.01, 0.01),
    Layer("blocks.1", {"in.weight": (5, 5), "in.bias": (5,)}, 0.0, 0.03),
    Layer("", {"scale": (7,)}, 0.01, 0.02),
)
TRACE = Trace("small", "made up", 4, LAYERS)


def shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
