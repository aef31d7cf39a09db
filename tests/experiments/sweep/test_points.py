from gradwire.experiments.cli.study import options_of
from gradwire.experiments.sweep.config import SweepConfig
from gradwire.experiments.sweep.points import points_of


def test_the_points_are_the_product_of_the_grid_in_order():
    config = SweepConfig(
        command="compare", base={"model": {"name": "mlp", "width": 16}}, grid={"lr": [1, 2], "seed": [3, 4]}
    )
    points = points_of(config, options_of)
    assert [tuple(point.chosen.values()) for point in points] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert points[0].arguments == ["compare", "--model.name=mlp", "--model.width=16", "--lr=1", "--seed=3"]
    assert len({point.key() for point in points}) == 4
    assert points[0].options["model"]["width"] == 16
