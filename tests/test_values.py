"""Options: checks, documentation and transformers' parser use the declaration of a field."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from option_tables import option_table
from transformers import HfArgumentParser
from user_errors import rejects

from recnmt_hf._values import Range, check_options, documented, option, options_of, parse
from recnmt_hf.errors import short_repr


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
    ("values", "allowed", "remedy"),
    [
        ({"layers": 0}, "an integer from 1 to 9", "Correct it, or leave it out (the default is 3)"),
        (
            {"layers": "3"},
            "an integer from 1 to 9",
            "Write it without quotes, or leave it out (the default is 3)",
        ),
        (
            {"sugar": 1.0},
            "a number from 0 to below 1 or null",
            "Correct it, or leave it out (the default is null)",
        ),
        ({"icing": "lemons"}, "one of lemon, none", "Write lemon, or leave it out (the default is 'lemon')"),
        ({"size": "big"}, "one of small, large", "Correct it, or leave it out (the default is 'small')"),
        ({"candles": 1}, "true or false", "Correct it, or leave it out (the default is False)"),
        ({"guests": "all"}, "a list", "Correct it"),
    ],
)
def test_wrong_values_are_rejected(values, allowed, remedy):
    ((name, value),) = values.items()
    with rejects(f"={short_repr(value)} ", allowed, remedy, field=f"cake.{name}"):
        check_options(Cake(**values), "cake.")


@pytest.mark.parametrize(
    ("content", "code", "field"),
    [
        ({"layer": 3}, "There is no field", "cake.layer"),
        ({"size": ""}, "is empty", "cake.size"),
        ([3], "must be a mapping of names to values,", "cake"),
        ({"layers": 10}, "is not allowed; it must be", "cake.layers"),
    ],
)
def test_wrong_mappings_are_rejected(content, code, field):
    with rejects(code, field=field):
        parse(CheckedCake, content, "cake")


def test_integers_written_as_floats_are_converted():
    cake = Cake(layers=4e0)
    check_options(cake)
    assert cake.layers == 4 and isinstance(cake.layers, int)


def test_declaration_of_a_field():
    layers = options_of(Cake)["layers"]
    assert (layers.hint, layers.allowed, layers.default, layers.help) == (int, Range(1, 9), 3, "how many layers")
    assert options_of(Cake)["size"].choices == ("small", "large")


def test_documentation_of_fields():
    line = "layers (an integer from 1 to 9, *optional*, defaults to `3`): How many layers."
    assert f"    Args:\n        {line}\n" in Cake.__doc__
    assert option_table(Cake, ["layers", "candles", "guests"]).splitlines() == [
        "| option | default | values | meaning |",
        "|---|---|---|---|",
        "| `layers` | `3` | an integer from 1 to 9 | how many layers |",
        "| `candles` | `false` | true or false | whether there are candles |",
        "| `guests` | | a list | who comes |",
    ]


def test_the_parser_of_transformers_reads_the_fields():
    """It passes all metadata of a field on to argparse."""
    (cake,) = HfArgumentParser(Cake).parse_args_into_dataclasses(["--layers", "5", "--icing", "none", "--candles"])
    assert (cake.layers, cake.icing, cake.candles, cake.sugar) == (5, "none", True, None)
