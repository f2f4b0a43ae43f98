"""Formulas, their relations, and the generated corpus, against truth tables that know nothing of worlds as bits."""

import itertools
from collections import Counter

import pytest
from logic import MAX_OPERATORS, OPERATORS, PROPOSITIONS, RELATIONS, generate_logic, main, read_logic


def parse(words):
    """A formula as a nested tuple; it takes its words from the front of the list."""
    word = words.pop(0)
    if word != "(":
        assert word in PROPOSITIONS
        return word
    if words[0] == "not":
        words.pop(0)
        found = ("not", parse(words))
    else:
        left = parse(words)
        assert words.pop(0) == "("
        operator = words.pop(0)
        assert operator in ("and", "or")
        found = (operator, left, parse(words))
        assert words.pop(0) == ")"
    assert words.pop(0) == ")"
    return found


def holds(formula, truth):
    if isinstance(formula, str):
        return truth[formula]
    if formula[0] == "not":
        return not holds(formula[1], truth)
    left, right = (holds(side, truth) for side in formula[1:])
    return (left and right) if formula[0] == "and" else (left or right)


def relation_by_truth_table(left, right):
    rows = set()
    for values in itertools.product([False, True], repeat=len(PROPOSITIONS)):
        truth = dict(zip(PROPOSITIONS, values, strict=True))
        rows.add((holds(left, truth), holds(right, truth)))
    both, only_left, only_right, neither = (row in rows for row in itertools.product([True, False], repeat=2))
    assert (both or only_left) and (both or only_right), "a formula is never true"
    assert (neither or only_right) and (neither or only_left), "a formula is always true"
    if both and neither and not (only_left and only_right):
        return ">" if only_left else "<" if only_right else "="
    if not both and not neither:
        return "^"
    if not both:
        return "|"
    return "v" if not neither else "#"


def check_pair(pair, operators):
    trees, counts = [], []
    for side in (pair.left, pair.right):
        words = side.split()
        counts.append(sum(word in OPERATORS for word in words))
        trees.append(parse(words))
        assert words == [], side
    assert min(max(counts), MAX_OPERATORS) == operators
    assert relation_by_truth_table(*trees) == pair.relation, pair


@pytest.fixture(scope="module")
def generated():
    return generate_logic(20_000, seed=3)


def test_relations_are_those_of_truth_tables(generated):
    """Every number of operators, and every relation, among pairs drawn and public."""
    seen = Counter()
    for bins in generated.values():
        for operators, pairs in enumerate(bins):
            for pair in pairs[:60]:
                check_pair(pair, operators)
                seen[pair.relation] += 1
    assert set(seen) == set(RELATIONS)


def test_public_pairs(real_data):
    for operators in range(MAX_OPERATORS + 1):
        for split in ("train", "test"):
            for pair in read_logic(real_data / "logic_bowman2015", split, operators)[:40]:
                check_pair(pair, operators)


def test_shape_of_the_corpus(generated):
    """As the public one: half of the pairs are independent, both sides speak of the same four propositions at most."""
    every = [pair for bins in generated.values() for pairs in bins for pair in pairs]
    shares = Counter(pair.relation for pair in every)
    # Of the public 249,079 pairs: # 53.0%, each of > < | v between 10.6% and 11.0%, = 1.9%, ^ 1.7%.
    assert 0.50 < shares["#"] / len(every) < 0.56
    assert all(0.09 < shares[relation] / len(every) < 0.13 for relation in "<>|v")
    assert all(0.01 < shares[relation] / len(every) < 0.03 for relation in "=^")
    assert all(len(set(f"{pair.left} {pair.right}".split()) & set(PROPOSITIONS)) <= 4 for pair in every)
    # The nesting of `and` and `or` is at most three deep, so of those operators there are at most seven.
    assert max(side.split().count("(") for pair in every for side in pair[1:]) <= 7 * 2 + 15
    for train, test in zip(*generated.values(), strict=True):
        assert not set(train) & set(test) and len(set(train)) == len(train) and len(set(test)) == len(test)
        assert abs(len(test) - 0.15 * (len(train) + len(test))) <= 0.5


def test_the_program_writes_what_it_generates(tmp_path, capsys):
    main([str(tmp_path / "logic"), "--pairs", "2000", "--seed", "3"])
    assert capsys.readouterr().out.startswith("train: ")
    corpus = generate_logic(2000, 3)
    for split in corpus:
        for operators in (0, 3, MAX_OPERATORS):
            if corpus[split][operators]:
                assert read_logic(tmp_path / "logic", split, operators) == corpus[split][operators]
    assert len(list((tmp_path / "logic").glob("*.tsv"))) == 26
