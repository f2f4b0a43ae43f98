"""Sentences of test sets in the training text."""

from recnmt_hf.training.finishing import rows_in_training


def test_case_punctuation_and_spaces_do_not_count():
    training = ["The dog sleeps.", "Ein Hund!", "", "we see  the cat"]
    sets = {"test": ["the dog sleeps", "A dog.", "The dog -- sleeps!"], "validation": ["We see the cat.", "..."]}
    assert rows_in_training(training, sets) == {"test": [0, 2], "validation": [0]}
