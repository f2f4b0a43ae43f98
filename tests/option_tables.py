"""Tables of options, as the README files contain them."""

from dataclasses import MISSING

from recnmt_hf.options import default_text, options_of


def option_table(kind, names=None):
    """Return a dataclass' options as a table in Markdown, all or those of some names."""
    rows = ["| option | default | values | meaning |", "|---|---|---|---|"]
    for name, entry in options_of(kind).items():
        if names is None or name in names:
            default = "" if entry.default is MISSING else f"`{default_text(entry)}`"
            rows.append(f"| `{name}` | {default} | {entry.kind()} | {entry.help} |")
    return "\n".join(row.replace("|  |", "| |") for row in rows)
