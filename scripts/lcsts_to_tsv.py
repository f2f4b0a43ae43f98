"""Convert a part of LCSTS (Hu et al., 2015), short Chinese texts and their summaries, to tab-separated pairs."""

import argparse
import re
from collections.abc import Iterator

from recnmt_hf.data.files import open_output
from recnmt_hf.data.text import read_lines


ELEMENT = re.compile(r"<(short_text|summary|human_label)>(.*?)</\1>")


def read_lcsts(path: str, min_score: int | None = None) -> Iterator[tuple[str, str]]:
    """
    Yield short texts and their summaries from `<doc id=..>` elements with `<summary>` and `<short_text>`, in parts II
    and III also `<human_label>`, from 1 (irrelevant) to 5 (relevant). Documents with a label below `min_score` are
    skipped, those without a label are not. `ValueError` if a document is damaged, or there is none.
    """
    document, start = "", 1
    for number, line in enumerate(read_lines(path), start=1):
        document += line
        if "</doc>" not in line:
            continue
        parts = {name: " ".join(text.split()) for name, text in ELEMENT.findall(document)}
        label = parts.get("human_label", "5")
        if document.count("<doc ") != 1 or not {"short_text", "summary"} <= set(parts) or not label.isdecimal():
            raise ValueError(f"{path}, line {start}: damaged document.")
        if min_score is None or int(label) >= min_score:
            yield parts["short_text"], parts["summary"]
        document, start = "", number + 1
    if "<doc " in document or start == 1:
        raise ValueError(f"{path}, line {start}: no complete document.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", help="a part of LCSTS in its own format, plain or compressed")
    parser.add_argument("output", help="output: TSV file of texts and summaries")
    parser.add_argument("--min-score", type=int, help="minimum human label of a pair; the papers use 3")
    args = parser.parse_args(arguments)
    with open_output(args.output, [args.part]) as out:
        for pair in read_lcsts(args.part, args.min_score):
            print(*pair, sep="\t", file=out)


if __name__ == "__main__":
    main()
