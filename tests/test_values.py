"""Options: checks, documentation and transformers' parser use the declaration of a field."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from transformers import HfArgumentParser
from user_errors import rejects

from recnmt_hf.errors import short_repr
from recnmt_hf.options import Range, check_options, documented, option, parse


@documented
@dataclass
class Cake:
    """A cake."""

    layers: Annotated[int, Range(least=1, most=9)] = option(3, "how many layers")
    sugar: Annotated[float | None, Range(least=0, below=1)] = option(None, "share of sugar")
    icing: Literal["lemon", "none"] = option("lemon", "what is on top")
    size: str = option("small", "how large", choices=("small", "large"))
    candles: bool = option(False, "whether there are candles")
    guests: list[str] = field(default_factory=list, metadata={"help": "who comes"})


@dataclass
class CheckedCake(Cake):
    def __post_init__(self):
        check_options(self)


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"layers": 0}, "an integer from 1 to 9"),
        ({"layers": "3"}, "an integer from 1 to 9"),
        ({"layers": True}, "an integer from 1 to 9"),
        ({"sugar": 1.0}, "a number from 0 to below 1 or null"),
        ({"sugar": float("nan")}, "a number from 0 to below 1 or null"),
        ({"icing": "lemons"}, "one of lemon, none"),
        ({"size": "big"}, "one of small, large"),
        ({"candles": 1}, "true or false"),
        ({"guests": "all"}, "a list"),
        ({"guests": ["a\0b"]}, "a list"),
        ({"guests": ["\ud800"]}, "a list"),
    ],
)
def test_wrong_values_are_rejected(values, allowed):
    ((name, value),) = values.items()
    with rejects(f"={short_repr(value)} ", allowed, field=f"cake.{name}"):
        check_options(Cake(**values), "cake.")


@pytest.mark.parametrize(
    ("content", "field"),
    [({"layer": 3}, "cake.layer"), ({"size": ""}, "cake.size"), ([3], "cake"), ({"layers": 10}, "cake.layers")],
)
def test_wrong_mappings_are_rejected(content, field):
    with rejects(field=field):
        parse(CheckedCake, content, "cake")


def test_integers_written_as_floats_are_converted():
    cake = Cake(layers=4e0)
    check_options(cake)
    assert cake.layers == 4 and isinstance(cake.layers, int)


def test_documentation_of_fields():
    line = "layers (an integer from 1 to 9, *optional*, defaults to `3`): How many layers."
    assert f"    Args:\n        {line}\n" in Cake.__doc__


def test_the_parser_of_transformers_reads_the_fields():
    """It passes all metadata of a field on to argparse."""
    (cake,) = HfArgumentParser(Cake).parse_args_into_dataclasses(["--layers", "5", "--icing", "none", "--candles"])
    assert (cake.layers, cake.icing, cake.candles, cake.sugar) == (5, "none", True, None)
