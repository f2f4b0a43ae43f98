"""Options stated once: what a field of a dataclass says is checked, documented, and read by transformers' parser."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from transformers import HfArgumentParser

from recnmt_hf import UserError
from recnmt_hf._values import Range, check_options, documented, option, option_table, options_of


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, "layers=0 is not allowed; it must be a whole number of at least 1 and at most 9. Remedy: corr"),
        ({"layers": "3"}, "layers='3' is not allowed; .* Remedy: write it without quotes, or leave it out .* is 3"),
        ({"sugar": 1.0}, "sugar=1.0 is not allowed; it must be a number of at least 0 and below 1 or null"),
        ({"icing": "lemons"}, "icing='lemons' is not allowed; it must be one of lemon, none. Remedy: write lemon"),
        ({"size": "big"}, "size='big' is not allowed; it must be one of small, large"),
        ({"candles": 1}, "candles=1 is not allowed; it must be true or false"),
        ({"guests": "all"}, r"guests='all' is not allowed; it must be a list. Remedy: correct it\.$"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(UserError, match=f"cake.{message}"):
        check_options(Cake(**values), "cake.")


def test_whole_numbers_become_such():
    cake = Cake(layers=4e0)
    check_options(cake)
    assert cake.layers == 4 and isinstance(cake.layers, int)


def test_statements_of_a_field():
    layers = options_of(Cake)["layers"]
    assert (layers.hint, layers.allowed, layers.default, layers.help) == (int, Range(1, 9), 3, "how many layers")
    assert options_of(Cake)["size"].choices == ("small", "large")


def test_documentation_states_the_same():
    assert "layers, *optional*, defaults to `3`: how many layers; a whole number of at least 1 and" in Cake.__doc__
    assert option_table(Cake, ["layers", "candles", "guests"]).splitlines() == [
        "| option | default | values | meaning |",
        "|---|---|---|---|",
        "| `layers` | `3` | a whole number of at least 1 and at most 9 | how many layers |",
        "| `candles` | `false` | true or false | whether there are candles |",
        "| `guests` | | a list | who comes |",
    ]


def test_the_parser_of_transformers_reads_such_fields():
    """It passes all metadata of a field on to argparse."""
    (cake,) = HfArgumentParser(Cake).parse_args_into_dataclasses(["--layers", "5", "--icing", "none", "--candles"])
    assert (cake.layers, cake.icing, cake.candles, cake.sugar) == (5, "none", True, None)
