#!/usr/bin/env python
"""
Write a generated corpus of logical inference: pairs of formulas of propositional logic and the relation between them
(Bowman et al., 2015, "Tree-structured Composition in Neural Networks without Tree-structured Architectures").

    python scripts/experiments/logic.py outputs/logic --pairs 500000
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from recnmt_hf.commands.arguments import SEED, Parser, whole
from recnmt_hf.data.files import open_output_folder
from recnmt_hf.data.text import read_lines, write_lines
from recnmt_hf.errors import UserError


PROPOSITIONS = ("a", "b", "c", "d", "e", "f")
OPERATORS = ("and", "or", "not")
WORDS = (*PROPOSITIONS, *OPERATORS, "(", ")")
# Entailment, its reverse, equality, negation, independence, alternation, cover (MacCartney, 2009).
RELATIONS = ("<", ">", "=", "^", "#", "|", "v")
# Files of a corpus are numbered by operators; the last one also has pairs of more operators.
MAX_OPERATORS = 12
SPLITS = ("train", "test")
# The formulas of a pair share this many propositions.
PAIR_PROPOSITIONS = 4
TEST_SHARE = 0.15

# The worlds in which a proposition is true, as bits: in world n, proposition i is true if n has digit i.
_WORLDS = 2 ** len(PROPOSITIONS)
ALL_WORLDS = 2**_WORLDS - 1
TRUE_WORLDS = {
    name: sum(1 << world for world in range(_WORLDS) if world >> place & 1) for place, name in enumerate(PROPOSITIONS)
}
# Whether there are worlds in which (both, only left, only right, neither) are true -> relation; otherwise independence.
_RELATION_OF = {
    (True, False, False, True): "=",
    (True, False, True, True): "<",
    (True, True, False, True): ">",
    (False, True, True, False): "^",
    (False, True, True, True): "|",
    (True, True, True, False): "v",
}


class LogicPair(NamedTuple):
    """Two formulas, words separated by spaces, and one of `RELATIONS` between them."""

    relation: str
    left: str
    right: str

    @property
    def operators(self) -> int:
        """The number of operators of the formula that has more."""
        return max(sum(word in OPERATORS for word in side.split()) for side in (self.left, self.right))


def relation_of(left: int, right: int) -> str:
    """Return the relation of two formulas from the worlds in which they are true, as bits."""
    neither = ALL_WORLDS & ~(left | right)
    return _RELATION_OF.get((bool(left & right), bool(left & ~right), bool(right & ~left), bool(neither)), "#")


def draw_formula(generator: random.Random, names: list[str], size: int = 12) -> tuple[str, int]:
    """
    Draw a formula over some propositions; return it with the worlds in which it is true.

    The probability of a proposition is 5/9, of `and` and `or` 2/9 each, whose sides are drawn with half the size. A
    size below 2 always gives a proposition. A third of all formulas is negated.
    """
    operator = generator.choice(("and", "or", "and", "or", None, None, None, None, None))
    if operator is None or size < 2:
        text = generator.choice(names)
        worlds = TRUE_WORLDS[text]
    else:
        (left, in_left), (right, in_right) = (draw_formula(generator, names, size // 2) for _ in range(2))
        text = f"( {left} ( {operator} {right} ) )"
        worlds = in_left & in_right if operator == "and" else in_left | in_right
    if generator.randrange(3) == 0:
        return f"( not {text} )", ALL_WORLDS & ~worlds
    return text, worlds


def draw_pairs(seed: int) -> Iterator[LogicPair]:
    """Yield pairs without end; no formula is always true or never true."""
    generator = random.Random(seed)
    while True:
        names = generator.sample(PROPOSITIONS, PAIR_PROPOSITIONS)
        (left, in_left), (right, in_right) = (draw_formula(generator, names) for _ in range(2))
        if {in_left, in_right}.isdisjoint((0, ALL_WORLDS)):
            yield LogicPair(relation_of(in_left, in_right), left, right)


def generate_logic(pairs: int = 500_000, seed: int = 1) -> dict[str, list[list[LogicPair]]]:
    """
    Generate a corpus of logical inference in the way of Bowman et al. (2015): draw a number of pairs, and remove
    duplicates. Return for `"train"` and `"test"` one list of pairs per number of operators from 0 to 12 (or more). The
    last 15% of each number are for the test.
    """
    bins: list[dict[LogicPair, None]] = [{} for _ in range(MAX_OPERATORS + 1)]
    for pair, _ in zip(draw_pairs(seed), range(pairs), strict=False):
        bins[min(pair.operators, MAX_OPERATORS)].setdefault(pair)
    corpus: dict[str, list[list[LogicPair]]] = {split: [] for split in SPLITS}
    for bin_pairs in map(list, bins):
        size = round(len(bin_pairs) * (1 - TEST_SHARE))
        corpus["train"].append(bin_pairs[:size])
        corpus["test"].append(bin_pairs[size:])
    return corpus


def read_logic(folder: str | Path, split: str, operators: int) -> list[LogicPair]:
    """
    Read the pairs of a split (`"train"` or `"test"`) with a number of operators from 0 to 12. A line has relation, left
    and right formula, separated by tabs. The folder contains `train0.tsv` to `test12.tsv`, plain or with `.gz` or
    `.zst`, or, as in the public corpus, without ending. Exit with a message for a missing file or a malformed line.
    """
    folder, name = Path(folder), f"{split}{operators}"
    paths = [path for ending in (".tsv", ".tsv.gz", ".tsv.zst", "") if (path := folder / f"{name}{ending}").is_file()]
    if not paths:
        names = ", ".join(sorted(path.name for path in folder.glob(f"{split}*"))) or "none"
        raise SystemExit(f"{folder / name}.tsv does not exist, only {names}; logic.py writes a generated corpus")
    pairs = []
    for number, line in enumerate(read_lines(paths[0]), start=1):
        relation, *formulas = line.split("\t")
        if relation not in RELATIONS or len(formulas) != 2 or not all(map(is_formula, formulas)):
            expected = f"a relation ({' '.join(RELATIONS)}) and two formulas, separated by tabs"
            raise SystemExit(f"{paths[0]}, line {number}: expected {expected}")
        pairs.append(LogicPair(relation, *formulas))
    if not pairs:
        raise SystemExit(f"{paths[0]} is empty")
    return pairs


def is_formula(text: str) -> bool:
    """Return whether a text consists of the words of formulas."""
    words = text.split()
    return bool(words) and all(word in WORDS for word in words)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="logic.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("output", help="folder for train0.tsv to train12.tsv and test0.tsv to test12.tsv, one per number of operators")
    add("--pairs", type=whole(1, 10**8), default=500_000, help="number of pairs to draw; duplicates are removed")
    add("--seed", type=SEED, default=1, help="random seed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    with open_output_folder(args.output) as working:
        corpus = generate_logic(args.pairs, args.seed)
        for split, bins in corpus.items():
            for operators, pairs in enumerate(bins):
                write_lines(working / f"{split}{operators}.tsv", ("\t".join(pair) for pair in pairs))
    for split, bins in corpus.items():
        print(f"{split}: {sum(map(len, bins))} pairs")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"logic.py: {error}")
