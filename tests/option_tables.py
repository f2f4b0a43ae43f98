"""Tables of options, as the README files contain them."""

from dataclasses import MISSING

from recnmt_hf.options import default_text, options_of


def option_table(kind, names=None):
    """Return a dataclass' options as a table in Markdown, all or those of some names."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, entry in options_of(kind).items():
        if names is None or name in names:
            default = "" if entry.default is MISSING else f"`{default_text(entry)}`"
            choices = "" if entry.choices is None and "Literal" not in str(entry.hint) else f" ({entry.kind()})"
            rows.append(f"| `{name}` | {default} | {entry.help}{choices} |")
    return "\n".join(row.replace("|  |", "| |") for row in rows)
