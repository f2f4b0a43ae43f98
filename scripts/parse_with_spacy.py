"""Write dependency trees of sentences as CoNLL-U, and their words separated by spaces, with a pipeline of spaCy."""

import argparse

from recnmt_hf._plain_text import is_blank
from recnmt_hf.data.files import open_output
from recnmt_hf.data.text import read_lines


def write_trees(source: str, words: str, trees: str, pipeline: str) -> None:
    """Parse the lines of a text file, each one sentence. A blank line has an empty line of words and no tree."""
    import spacy

    parser = spacy.load(pipeline, exclude=["ner", "lemmatizer"])
    with open_output(words, [source]) as text, open_output(trees, [source]) as tree:
        lines = ("" if is_blank(line) else " ".join(line.split()) for line in read_lines(source))
        for sentence in parser.pipe(lines):
            print(*sentence, file=text)
            for word in sentence:
                head = 0 if word.head.i == word.i else word.head.i + 1  # spaCy's roots are their own heads
                print(word.i + 1, word.text, "_", "_", "_", "_", head, word.dep_, "_", "_", sep="\t", file=tree)
            print(file=tree)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="text file, plain or compressed, with one sentence per line")
    parser.add_argument("words", help="output: the same sentences, words separated by spaces")
    parser.add_argument("trees", help="output: CoNLL-U")
    parser.add_argument("--pipeline", default="en_core_web_sm", help="installed pipeline of spaCy with a parser")
    write_trees(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
