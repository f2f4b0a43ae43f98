"""The table of `recnmt inspect`: families, functions, options, and the names of the commands before it."""

import inspect

import torch
from user_errors import rejects

import recnmt_hf
from recnmt_hf.analysis.subjects import SUBJECTS, find_subject, load_function
from recnmt_hf.commands.main import MOVED, main


def test_every_function_takes_the_options_of_its_row():
    for family, subject in SUBJECTS.items():
        assert family in recnmt_hf.MODEL_TYPES
        names = tuple(inspect.signature(load_function(subject)).parameters)
        assert names == ("translator", "sentence", "output", *subject.options)
        assert set(subject.options) <= {"target", "layer", "head", "direction"}


def test_a_derived_family_has_the_subject_of_its_base():
    class Derived(recnmt_hf.GRETConfig):
        model_type = "derived_gret"

    config = Derived.from_preset("tiny", vocab_size=20)
    assert find_subject(config) is SUBJECTS["gret"] and find_subject(config, "tree").name == "tree"
    with rejects("Use a model of one of these families"):
        find_subject(recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=20))


def test_old_command_names_work_with_a_notice(tokenizer, tmp_path, capsys):
    subjects = {name for name, line in MOVED.items() if f"--subject {name}" in line}
    assert subjects == {subject.name for subject in SUBJECTS.values()} - {"relations"}
    torch.manual_seed(2)
    config = recnmt_hf.ONLSTMTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), d_model=32)
    recnmt_hf.ONLSTMTransformerForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    words = [str(tmp_path), "The dog sleeps.", "--device", "cpu"]
    assert main(["inspect", *words]) == 0
    expected = capsys.readouterr()
    assert main(["tree", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected.out and "((" in printed.out and "recnmt tree" not in expected.err
    assert "recnmt tree" in printed.err and "recnmt inspect" in printed.err
    assert main(["global", *words]) == 2
    assert "Use a gret with use_global_state=true" in capsys.readouterr().err
