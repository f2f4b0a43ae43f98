"""
The artificial task of Bastings et al. (2017): put shuffled letters back into their order. Each letter has two edges, to
the place where it belongs and to a random place. Their relations, ten labels, distinguish the two kinds. The model has
to learn which is which, and can only solve the task by reading the graph.

    python scripts/examples/reordering.py              # BLEU and the gates of both kinds after each epoch
    python scripts/examples/reordering.py --no-edges   # the same model without edges
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from recnmt_hf import Bleu, GCNRNMTConfig, GCNRNMTForConditionalGeneration


PADDING, START, END, FIRST_LETTER = range(4)
LABELS = 5  # of each kind: ids 1 to 5 are true edges, 6 to 10 fake ones


@dataclass
class Task:
    """Sizes of the task and of its model; the defaults are those of the paper."""

    letters: int = 26
    shortest: int = 3
    longest: int = 10
    train: int = 25_000
    validation: int = 1_000
    batch_size: int = 80
    epochs: int = 6
    d_model: int = 64
    learning_rate: float = 1e-3
    seed: int = 1

    def make(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        """
        Return `count` sequences: inputs of a model, between a start and an end symbol, with two edges for each letter.
        """
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(self.shortest, self.longest + 1, (count,), generator=generator)
        inside = torch.arange(self.longest)[None] < lengths[:, None]
        shape = inside.shape

        def permutations() -> torch.Tensor:
            """A random order of the places of each sequence."""
            return torch.rand(shape, generator=generator).masked_fill(~inside, 2.0).argsort(dim=1)

        letters = torch.randint(FIRST_LETTER, FIRST_LETTER + self.letters, shape, generator=generator)
        true, fake = permutations(), permutations()  # where the letter in each place of the source belongs; anywhere
        around = torch.zeros(count, 1, dtype=torch.long)
        source = torch.cat([around + START, letters.gather(1, true).masked_fill(~inside, PADDING), around], 1)
        source.scatter_(1, lengths[:, None] + 1, END)
        labels = torch.cat([letters.masked_fill(~inside, -100), around - 100], 1).scatter(1, lengths[:, None], END)
        heads = torch.full((count, self.longest + 2, 2), -1)
        # A letter's head is the place of its number in the row, which begins with the start symbol.
        heads[:, 1:-1] = torch.stack([true, fake], dim=2).masked_fill(~inside[:, :, None], -1)
        relations = torch.randint(1, LABELS + 1, heads.shape, generator=generator)
        relations[:, :, 1] += LABELS
        return {
            "input_ids": source,
            "attention_mask": (source != PADDING).long(),
            "labels": labels,
            "dependency_heads": heads,
            "dependency_relations": relations,
        }

    def build(self) -> GCNRNMTForConditionalGeneration:
        """Return a model with one graph-convolution layer."""
        torch.manual_seed(self.seed)
        config = GCNRNMTConfig(
            vocab_size=FIRST_LETTER + self.letters,
            d_model=self.d_model,
            num_relations=2 * LABELS + 1,
            gcn_layers=1,
            dropout=0.0,
            readout_dropout=0.0,
            gcn_dropout=0.0,
            gcn_edge_dropout=0.0,
            init_uniform=None,
        )
        return GCNRNMTForConditionalGeneration(config)


def without_edges(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch whose edges are removed."""
    return batch | {"dependency_heads": torch.full_like(batch["dependency_heads"], -1)}


def train(task: Task, model: GCNRNMTForConditionalGeneration, has_edges: bool = True) -> Iterator[int]:
    """Train a model with Adam at a rate that falls to zero; yield the number of each epoch after it."""
    data = task.make(task.train, task.seed)
    data = data if has_edges else without_edges(data)
    generator = torch.Generator().manual_seed(task.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.learning_rate)
    steps = task.epochs * -(-task.train // task.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps)))
    for epoch in range(1, task.epochs + 1):
        model.train()
        for rows in torch.randperm(task.train, generator=generator).split(task.batch_size):
            batch = {name: column[rows] for name, column in data.items()}
            model(**batch, return_logits=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        yield epoch


def evaluate(task: Task, model: GCNRNMTForConditionalGeneration, has_edges: bool = True) -> float:
    """Return BLEU of greedy search on the validation sequences."""
    data = task.make(task.validation, task.seed + 1)
    data = data if has_edges else without_edges(data)
    labels = data.pop("labels")
    found = model.eval().generate(**data, max_new_tokens=task.longest + 1)[:, 1:]
    references, translations = ([text(row) for row in rows.tolist()] for rows in (labels, found))
    scores = Bleu(tokenize="none").compute(predictions=translations, references=references)
    return float(scores["score"])


def text(row: list[int]) -> str:
    """Return the symbols before the end as words."""
    end = row.index(END) if END in row else len(row)
    return " ".join(str(symbol) for symbol in row[:end])


def gate_biases(model: GCNRNMTForConditionalGeneration) -> tuple[float, float]:
    """Return the means of the gates' biases of the true and of the fake relations."""
    layer = model.get_encoder().gcn_layers[0]
    biases = (layer.in_messages.gate_bias.detach() + layer.out_messages.gate_bias.detach()) / 2
    return float(biases[1 : LABELS + 1].mean()), float(biases[LABELS + 1 :].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a graph-convolutional model to reorder letters.")
    parser.add_argument("--no-edges", action="store_true", help="remove all edges")
    parser.add_argument("--epochs", type=int, default=Task.epochs)
    arguments = parser.parse_args()
    task = Task(epochs=arguments.epochs)
    model = task.build()
    for epoch in train(task, model, not arguments.no_edges):
        true, fake = gate_biases(model)
        score = evaluate(task, model, not arguments.no_edges)
        print(f"epoch {epoch}: BLEU {score:.1f}, gate biases of true edges {true:+.2f}, of fake edges {fake:+.2f}")


if __name__ == "__main__":
    main()
