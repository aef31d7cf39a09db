"""Who may import whom: kernels <- compress <- ddp_core <- hooks <- experiments, and inside a layer a floor those below.

And who may communicate: ddp_core/transport alone.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["kernels", "compress", "ddp_core", "hooks", "experiments"]
DISTRIBUTED = "torch.distributed"
TRANSPORT = Path("ddp_core", "transport")
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce", "broadcast", "gather", "scatter")
COLLECTIVES += ("send", "recv", "isend", "irecv", "batch_isend_irecv")
METHODS = ("allreduce", "allgather", "alltoall", "reduce_scatter", "broadcast")  # of process groups, of nothing else
FLOORS = {  # the rooms of a layer, folders and files, from the ground up; those of one floor do not import each other
    "compress": "protocol < state < algorithms < feedback < simulate < builder < composed < shards < baselines",
    "ddp_core": "measure < transport < engine < buckets < memory < averaging < watching < observed < handle < reducer "
    "< overlap < torch_compat < module",
    "hooks": "backwards collectives handle_of internet model_kinds torch_ddp_checks overlap report_loss < torch_steps "
    "< torch_ddp < comm_hook < fsdp local_sgd < replicate < frameworks",
    "experiments": "bucket_plan ranks sites_plan < advice sharded_plan < results < ddp_step network kernels < workloads "
    "< optimizer_plan plan_config sharded_step < plan_advice sites_lines "
    "< advise bench collective compressor_help info plan ready rendezvous top try_script < check compare < cli < sweep",
}
LAZY = [  # what is imported only once it is asked for
    ("hooks/torch_ddp.py", "gradwire.hooks.fsdp"),
    ("hooks/torch_ddp.py", "gradwire.hooks.replicate"),
    ("gradwire/__init__.py", "gradwire.experiments.advice"),
    ("gradwire/__init__.py", "gradwire.experiments.bucket_plan"),
]
FILES = [file.relative_to(ROOT) for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]


def imports(tree, file):
    """{local name: absolute dotted name} of everything that a file of ours imports."""
    package = ["gradwire", *(folder for folder in file.parent.parts if folder != "gradwire")]
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module or "").split(".")] if node.module else base
            found |= {alias.asname or alias.name: ".".join([*module, alias.name]) for alias in node.names}
    return found


def complaints(source, file):
    """What a file does that its layer may not."""
    layer = file.parts[0]
    tree = ast.parse(source)
    names = imports(tree, file)
    above = LAYERS[LAYERS.index(layer) + 1 :]
    found = [name for name in names.values() for other in above if f"{name}.".startswith(f"gradwire.{other}.")]
    found = [name for name in found if (file.as_posix(), name.rpartition(".")[0]) not in LAZY]
    if layer in FLOORS and file != Path(layer, "__init__.py"):
        found += not_below(names.values(), file)
    if layer in ("kernels", "compress"):
        found += [name for name in names.values() if f"{name}.".startswith(f"{DISTRIBUTED}.")]
        attributes = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        found += [text for text in attributes if text.startswith(DISTRIBUTED)]
    if TRANSPORT not in file.parents:
        found += [name for name in called(tree, names) if is_collective(name)]
    return found


def floors_of(layer):
    """{room: its floor, 0 for the ground}."""
    return {room: floor for floor, rooms in enumerate(FLOORS[layer].split("<")) for room in rooms.split()}


def not_below(names, file):
    """What a file of a layer with floors imports from other rooms, and not from a lower floor."""
    layer, room = file.with_suffix("").parts[:2]
    floors, prefix = floors_of(layer), f"gradwire.{layer}."
    others = {name: name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    allowed = {name for name in others if (file.as_posix(), name.rpartition(".")[0]) in LAZY}
    return [
        name
        for name, other in others.items()
        if other != room and name not in allowed and floors.get(other, len(floors)) >= floors[room]
    ]


def called(tree, names):
    """The absolute names of the functions that a file calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            written = ast.unparse(node.func)
            known = [name for name in names if written == name or written.startswith(f"{name}.")]
            longest = max(known, key=len, default=None)
            yield written if longest is None else names[longest] + written.removeprefix(longest)


def is_collective(name):
    """Whether a call is one of torch.distributed's collectives, or a method of process groups."""
    if name.startswith("gradwire."):  # of ddp_core/transport, which calls them
        return False
    known = COLLECTIVES if name.startswith(f"{DISTRIBUTED}.") else METHODS
    return "." in name and name.rpartition(".")[2].lstrip("_").startswith(known)


def files_of(names):
    """Those of our files that are imported by these names, each a module's or of something in it; faces aside."""
    places = [ROOT.joinpath(*name.split(".")[1:]) for name in names if name.startswith("gradwire.")]
    found = {file for place in places for file in (place.with_suffix(".py"), place.parent.with_suffix(".py"))}
    return {file.relative_to(ROOT) for file in found if file.exists()}


def circle(graph):
    """Files of {file: those it imports} that import each other in turn, the first one twice; none where there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_a_layer_imports_those_below_and_only_transports_communicate():
    found = {file: complaints((ROOT / file).read_text(), file) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(("file", "module"), LAZY)
def test_what_may_be_imported_late_is_not_imported_with_its_file(file, module):
    tree = ast.parse((ROOT / file).read_text())
    at_once = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    everywhere, first = (imports(each, Path(file)).values() for each in (tree, at_once))
    assert any(f"{name}.".startswith(f"{module}.") for name in everywhere)
    assert not any(f"{name}.".startswith(f"{module}.") for name in first)


def test_no_files_import_each_other_in_a_circle():
    graph = {file: files_of(imports(ast.parse((ROOT / file).read_text()), file).values()) - {file} for file in FILES}
    assert sum(map(len, graph.values())) > len(FILES)
    assert circle(graph) == []
    (below, above), *_ = ((other, file) for file in graph for other in graph[file])
    assert set(circle({**graph, below: {*graph[below], above}})) >= {below, above}


@pytest.mark.parametrize("layer", FLOORS)
def test_every_room_of_a_layer_with_floors_is_on_one(layer):
    rooms = {file.relative_to(ROOT / layer).with_suffix("").parts[0] for file in (ROOT / layer).rglob("*.py")}
    assert sorted(floors_of(layer)) == sorted(rooms - {"__init__"})


@pytest.mark.parametrize("file", sorted((ROOT / "gradwire").glob("*.py")), ids=lambda file: file.name)
def test_the_public_face_only_imports(file):
    names = imports(ast.parse(file.read_text()), Path())
    allowed = LAYERS if file.name == "__main__.py" else LAYERS[:-1]
    late = tuple(f"{module}." for at, module in LAZY if at == f"gradwire/{file.name}")
    ours = [name for name in names.values() if name.startswith("gradwire.") and not name.startswith(late)]
    assert ours
    beside = [each.stem for each in file.parent.glob("*.py")]
    assert all(name.split(".")[1] in (*allowed, *beside) for name in ours)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("compress/a.py", "from ..hooks import attach"),
        ("hooks/a.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("hooks/a.py", "def f(self, x):\n    self.group._allgather_base(x, x)"),
        ("ddp_core/engine/a.py", "from ..averaging.averager import Averager"),
    ],
)
def test_an_arrow_that_runs_back_is_seen(file, source):
    assert complaints(source, Path(file))
