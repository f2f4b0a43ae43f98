"""
The codes and messages of all errors outside `models/`, by package. To reword a message, edit it here. To raise one:
`raise UserError("code", field=..., value=..., **details)`.
"""

from .models.user_errors import MESSAGES, UserError, short_repr


__all__ = ["MESSAGES", "ExistingFileError", "MissingFileError", "UserError", "short_repr"]


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that does not exist."""


class ExistingFileError(UserError, FileExistsError):
    """A file or folder that exists and must not be overwritten."""


# -- values and options ------------------------------------------------------------------------------------------------
VALUES: dict[str, str] = {
    "option.value": "{field}={value} is not allowed; it must be {allowed}. Remedy: {remedy}.",
    "option.unknown": "There is no field {field}. Remedy: {remedy}.",
    "option.mapping": (
        "{field} must be a mapping of names to values, not {kind}. Remedy: write {field}: {{name: value}}."
    ),
    "option.empty": "{field} is empty. Remedy: leave it out, or give it a value.",
    "model.json": "{field} is not a valid JSON object ({reason}). Remedy: copy it again from the original model.",
    "model.remote_code": (
        "The {what} {field} contains Python code, which was not run. Remedy: read the code and, if you trust it, "
        "pass --trust-remote-code (trust_remote_code=True). Commands without this option cannot load it."
    ),
    "model.not_seq2seq": (
        "{field} is not a translation model: its configuration is a {config}. Remedy: pass the folder or the id of a "
        "sequence-to-sequence model."
    ),
    "model.not_found": (
        "The {what} {field} was not found, neither as a folder nor on the Hub ({reason}). Remedy: correct the name, "
        "or check the connection and the permissions of the access token."
    ),
    "model.not_loaded": (
        "The {what} {field} cannot be loaded ({reason}). Remedy: pass a complete folder, as written by training or "
        "save_pretrained."
    ),
    "weights.damaged": (
        "The weights in {field} cannot be read ({reason}). The file is incomplete or damaged. Remedy: copy it again, "
        "or use an earlier checkpoint."
    ),
    "weights.shapes": (
        "The weights in {field} have other shapes than its config.json. Remedy: use weights and config.json of the "
        "same model."
    ),
    "tokenizer.missing": (
        "{field} has no tokenizer.json and no tokenizer_config.json. Remedy: copy them from the original model, or "
        "write them with the tokenizer's save_pretrained."
    ),
    "package.missing": (
        '{purpose} requires the package {package}, which is not installed. Remedy: pip install "recnmt-hf[{extra}]".'
    ),
}
# -- data --------------------------------------------------------------------------------------------------------------
DATA: dict[str, str] = {
    # files and folders
    "file.no_name": "The name of a file is empty. Remedy: give its path.",
    "file.missing": "{field} does not exist. {folder} contains {names}. Remedy: correct the path.",
    "file.no_folder": "{field} does not exist, because the folder {folder} does not. Remedy: correct the path.",
    "file.missing_folder": "The folder {field} does not exist. Remedy: correct the path.",
    "file.broken_link": "{field} is a link to {target}, which does not exist. Remedy: correct the link.",
    "file.is_folder": "{field} is a folder. Remedy: give the path of a file.",
    "file.unreadable": "{field} cannot be read ({reason}). Remedy: correct its path or permissions.",
    "file.empty": "{field} is empty. Remedy: give a file with content.",
    "file.line_too_long": (
        "{field}, line {line}: more than {most:,} bytes. Remedy: give text with one sentence per line."
    ),
    "file.not_utf8": (
        "{field}, line {line}: not UTF-8 ({reason}). Remedy: convert the file, e.g. with `iconv -f {encoding} -t "
        "UTF-8`."
    ),
    "file.damaged_gzip": (
        "{field}: the compressed file is truncated or damaged after line {line}. Remedy: copy or compress it again."
    ),
    "input.closed": "Standard input is closed. Remedy: give a file, or text through a pipe.",
    "output.not_writable": "{field} cannot be written ({reason}). Remedy: choose a writable place with enough space.",
    "output.is_file": "{field} is a file, but the output is a folder. Remedy: choose a new folder.",
    "output.not_empty": "{field} is not empty. Remedy: choose a new folder.",
    "output.has_model": "{field} contains a model ({file}). Remedy: choose another folder.",
    "output.is_input": "{field} is also an input and would be overwritten. Remedy: choose another output file.",
    "output.locked": "{field} is in use ({owner}). Remedy: try again when that process has finished.",
    "output.in_use": (
        "Another run ({owner}) writes into {field}. Remedy: wait for it or stop it, or choose another output folder."
    ),
    # corpora
    "corpus.kinds": (
        "A corpus must have exactly one of source (with target), tsv, jsonl, lcsts, dataset and generated, got "
        "{kinds}. Remedy: write several corpora as a list."
    ),
    "corpus.one_side": "{field} is missing: text files need both source and target. Remedy: add it.",
    "corpus.min_score": "{field}={value} is only allowed with lcsts. Remedy: remove it.",
    "corpus.not_a_list": (
        "{field} must be a list of corpora, got {kind}. Remedy: write e.g. [{{source: a.en, target: a.de}}] or "
        "[{{generated: train}}]."
    ),
    "corpus.generated_languages": (
        "The generated corpus is English-German, not {languages}. Remedy: set source_lang and target_lang to en and "
        "de, or give another corpus."
    ),
    "corpus.same_languages": (
        "{field} would be its own target, because source_lang and target_lang are both {language}. Remedy: set "
        "source_column and target_column."
    ),
    "corpus.different_lengths": (
        "{source} has {sources} lines, but {target} has {targets}. Remedy: look for the first line that has no "
        "translation; the files must be aligned line by line."
    ),
    "corpus.empty_sentence": (
        "{field}, {unit} {number}: blank sentence. Remedy: remove the pair from both sides, or skip such pairs with "
        'on_empty: skip (recipe) or on_empty="skip".'
    ),
    "corpus.no_pairs": "{field} contains no sentence pairs. Remedy: give at least one.",
    "corpus.all_blank": "The corpus contains no sentence pairs. Remedy: check its files and {field}={value}.",
    "corpus.all_too_long": (
        "All {pairs} sentence pairs exceed the limits (max_source_length={max_source_length}, "
        "max_target_length={max_target_length}, max_length_ratio). Remedy: allow longer sentences, or check the "
        "corpus."
    ),
    "corpus.tsv_fields": (
        "{field}, line {line}: expected 2 fields (source, target) separated by a tab, got {count}. Remedy: correct the"
        " line."
    ),
    "corpus.json_line": (
        "{field}, line {line}: expected a JSON object with text for {source!r} and {target!r} ({reason}). "
        'Remedy: write lines like {{"{source}": "..", "{target}": ".."}}.'
    ),
    "corpus.lcsts_document": (
        "{field}: the document at line {line} is damaged. Expected <doc id=..> with <summary>, <short_text> and "
        "perhaps a numeric <human_label>, then </doc>. Remedy: copy the file again."
    ),
    "corpus.killed_process": (
        "One of {value} processes that tokenize was killed, perhaps for lack of memory. Remedy: reduce {field}."
    ),
    "corpus.depths": "{field}={value} is not allowed; it must be above max_depth={max_depth}.",
    "corpus.grammar_too_small": (
        "The grammar has too few sentences of depth {depth}: it gave {count} of {value} in {tries} tries. Remedy: "
        "request fewer sentences, or allow more depth."
    ),
    "dataset.not_loaded": (
        "The dataset {field} cannot be loaded: {reason}. Remedy: check name, config and split, and the connection to "
        "the Hub."
    ),
    "dataset.no_column": (
        "The dataset {field} has no column {value}, only {columns}. Remedy: correct source_lang and target_lang, or "
        "set source_column and target_column."
    ),
    "dataset.not_text": (
        "The dataset {field}, row {row}: column {column!r} must contain text, got {value}. Remedy: set source_column "
        "and target_column to columns of sentences."
    ),
    "batches.lengths": (
        "There are {sources} source lengths and {targets} target lengths. Remedy: give one of each per sentence pair."
    ),
    "batches.too_few_pairs": (
        "{pairs} sentence pairs are too few for {value} processes. Remedy: give more data (is the corpus empty, or do "
        "length limits skip it?) or use fewer processes."
    ),
    "logic.missing_file": (
        "{field} does not exist. The folder has these files of the split: {names}. Remedy: correct the folder, or "
        "write the corpus with `recnmt logic-corpus`."
    ),
    "logic.line": (
        "{field}, line {line}: expected a relation ({relations}) and two formulas, separated by tabs. Remedy: correct "
        "the line."
    ),
    # tokenizers
    "tokenizer.byte_fallback": (
        "{field}={value} is not supported by a {kind} tokenizer, only by BPE. Remedy: set kind to bpe, or remove "
        "{field}."
    ),
    "tokenizer.vocabulary_too_small": (
        "{field}={value} is too small; it must be above {reserved}, the number of control tokens and bytes. Remedy: "
        "use some thousands for BPE, at least the size of the alphabet for characters."
    ),
    "tokenizer.single_text": "{field} must be a list of sentences, got one text ({value}). Remedy: put it into a list.",
    "tokenizer.not_text": "{field}: item {number} must be text, got {value}. Remedy: give sentences.",
    "tokenizer.no_text": "{field} contain no text to train a tokenizer on. Remedy: give at least one sentence.",
    "tokenizer.no_control_token": (
        "The tokenizer in {field} has no {name}. Remedy: set it (tokenizer.{name} = ...) and save the tokenizer again."
    ),
    "tokenizer.no_padding": (
        "The {field} has no padding token. Remedy: set it (tokenizer.pad_token = ...) to the one that the model was "
        "trained with."
    ),
    "tokenizer.missing_settings": (
        "The {field} has no padding token, because {file} is missing. Remedy: copy it from where the model was saved."
    ),
    "tokenizer.too_many_symbols": (
        "The {field} has {value} symbols, but the model's embedding only {rows} rows. Remedy: use the tokenizer that "
        "the model was trained with, or resize the embeddings."
    ),
    "tokenizer.other_size": (
        "The {field} has {value} symbols, but the model's embedding {rows} rows. Remedy: use the tokenizer that the "
        "model was trained with. In Python, check=False disables this check."
    ),
    "tokenizer.other_symbols": (
        "The {field} is not the one that the model was trained with: its symbols differ. Remedy: use the tokenizer in "
        "the folder that training wrote. If the model was trained again with this one, call "
        "stamp_tokenizers(model.config, ...) and save it. In Python, check=False disables this check."
    ),
    "tokenizer.other_encoding": (
        "The {field} is not the one that the model was trained with: it has the same symbols, but encodes text in "
        "another way (tokenizer.json or its settings were changed). Remedy: use the tokenizer in the folder that "
        "training wrote. If the model was trained again with this one, call stamp_tokenizers(model.config, ...) and "
        "save it. In Python, check=False disables this check."
    ),
    "tokenizer.padding_ids": (
        "The padding ids differ ({ids}), but the model has one for both sides and learns nothing for it. Remedy: use "
        "tokenizers with the same padding id; `recnmt tokenizer` sets it to 0."
    ),
    "tokenizer.other_end": (
        "The {field} ends sentences with token {value}, but the model with {trained}. Remedy: use the tokenizer that "
        "the model was trained with. In Python, check=False disables this check."
    ),
    "model.other_control_token": (
        "{field} is {value} in generation_config.json, but {trained} in config.json. Remedy: write the one that the "
        "model was trained with into both files. In Python, check=False disables this check."
    ),
    "model.no_end_token": (
        "The model has no {field} and could never end a sentence. Remedy: write the one that it was trained with into "
        "config.json. In Python, check=False disables this check."
    ),
    "model.token_ids": (
        "{field}={value} is not allowed in the model's settings (config.json, generation_config.json, "
        "recnmt_engine.json); it must be a token id or a list of them. Remedy: correct it, or export the model again."
    ),
}
# -- metrics -----------------------------------------------------------------------------------------------------------
METRICS: dict[str, str] = {
    "metric.nothing_to_score": "{field}: the list is empty. Remedy: give at least one sentence.",
    "metric.reference_counts": "{field}: every translation must have the same number of references, got {value}.",
    "metric.unusable_tokenizer": (
        "{field}={value} cannot be used ({reason}). Remedy: install what is missing, or choose another."
    ),
    "metric.language": (
        "{field}={value} is not a language code. Remedy: give a code of two or three letters, such as de."
    ),
    "metric.edges": "{field}={value} is not allowed; the edges must increase and be at least 1, such as 15 30 45.",
    "metric.repeated_systems": "Several systems have the same name: {value}. Remedy: give each a different name.",
    "metric.too_few_systems": "A comparison needs a baseline and at least one other system.",
    "alignment.not_a_link": (
        "{field}: {value} is not a link. Remedy: write source-target, such as 0-1, or 0p1 for a possible link."
    ),
    "alignment.position_below_one": (
        "{field}: {value} has a position below 1. Remedy: omit one_based if positions count from 0."
    ),
    "alignment.sure_not_possible": "The sure links {value} are missing in the possible links. Remedy: add them there.",
    "alignment.no_links": "Neither the alignments nor the gold alignments have a link, so there is no error rate.",
}
# -- inference ---------------------------------------------------------------------------------------------------------
INFERENCE: dict[str, str] = {
    "option.given_twice": "{field} and {other} set the same option. Remedy: give only one of them.",
    "option.too_many_hypotheses": (
        "{field}={value} is more than beams={beams}. Remedy: use at least as many beams as hypotheses."
    ),
    "option.no_length": "{field}={value} with max_length_factor=0 allows no token. Remedy: set one of them above 0.",
    "option.language": (
        "{field}={value} is not a language code. Remedy: use letters, digits, _ and -, such as en, de or zh-CN."
    ),
    "option.alignments_of_parts": (
        "{field}=true is not possible with on_long=split, because the parts of a split sentence have positions of "
        "their own. Remedy: use on_long=error, or split the sentences yourself."
    ),
    "option.seed_without_sampling": (
        "{field}={value} has no effect without do_sample=true. Remedy: add it to generate (--generate "
        "do_sample=true), or remove the seed."
    ),
    "generate.set_by_option": "{field} is controlled by the option {option}. Remedy: set that option instead.",
    "generate.not_settable": "{field} cannot be set, because the translator sets it. Remedy: remove it.",
    "generate.rejected": "{field}={value} was rejected by {engine} ({reason}). Remedy: correct it, or remove it.",
    "engine.unsupported": "{field} is not supported by {engine}. Remedy: remove it, or use one model in PyTorch.",
    "engine.samples_without_beams": (
        "{field}={value} is not possible when CTranslate2 samples. Remedy: use one beam (--beams 1)."
    ),
    "sentence.not_a_list": "{field} must be several sentences, got {value}. Remedy: pass a list.",
    "sentence.not_text": "{field}: expected text, got {value}.",
    "sentence.half_character": (
        "{field}: {value} is half of a character. Remedy: check the encoding with which the text was read."
    ),
    "sentence.wrong_keys": (
        'A sentence must be text or {{"text": ..., "prefix": ...}}, got a mapping with the keys {value}.'
    ),
    "sentence.too_long": (
        "{field} has {length} tokens; the maximum is {limit}: {value}. Remedy: shorten it, or let on_long "
        "(--on-long) split or truncate it."
    ),
    "sentence.cannot_split": (
        "{field} cannot be split into parts of {limit} tokens, because a single character has more. Remedy: increase "
        "max_source_length."
    ),
    "prefix.of_empty_sentence": (
        "{field} is empty, so its translation cannot begin with {value}. Remedy: leave this prefix empty, or check "
        "that sentences and prefixes are in the same order."
    ),
    "prefix.too_long": "{field} has {length} tokens, but the model can generate only {limit}. Remedy: shorten it.",
    "prefix.counts_differ": (
        "{field} end after {value}, but there are more {other}. Remedy: give one prefix for each sentence; it may be "
        "empty."
    ),
    "pair.counts_differ": (
        "{field} has {value} lines, but {other} has {expected}. Remedy: give lists that correspond line by line."
    ),
    "pair.empty": "{field} is empty, so it cannot be scored or aligned. Remedy: remove this pair.",
    "pair.too_long": "{field} has {length} {side} tokens; the model's maximum is {limit}. Remedy: shorten it.",
    "token.unknown_id": "{field}: {value} is not a token id from 0 to {most}. Remedy: use the token ids of this model.",
    "alignment.out_of_range": "{field}={value} does not exist in this model, which has 0 to {most}.",
    "alignment.no_attention": "The model returns no attention. Remedy: load it with attn_implementation='eager'.",
    "alignment.other_memory": (
        "The decoder of this model does not attend to source words, so it has no alignments. Remedy: use a model "
        "whose decoder attends to the encoder's states."
    ),
    "tokenizer.without_offsets": (
        "{field} does not return the positions of tokens, which alignments need. Remedy: load the fast version of "
        "the tokenizer, or convert it to tokenizer.json."
    ),
    "model.missing": (
        "{field} is not a model's folder (config.json is missing). Remedy: give the folder that training or "
        "save_pretrained wrote, or a model id of the Hub."
    ),
    "model.elsewhere": "{field} is not a model's folder, but {near} is. Remedy: give that folder.",
    "model.wrong_weights": (
        "The weights in {field} do not match its config.json ({faults}). Remedy: use weights and config.json of the "
        "same model."
    ),
    "model.weights_without_values": "These weights have no values: {names}. Remedy: load the model's weights.",
    "model.weights_not_finite": (
        "These weights are NaN or infinite: {names}. Remedy: use an earlier checkpoint; training diverged, or the "
        "file is damaged."
    ),
    "model.not_inspectable": (
        "{field} is {kind}, which gives no alignments, attentions or states. Remedy: use one model in PyTorch."
    ),
    "device.unavailable": "{field}={value} cannot be used ({reason}). Available: {available}.",
    "quantization.on_cpu_in_float32": (
        "{field}={value} is not possible with int8 quantization. Remedy: use the CPU and float32."
    ),
    "quantization.no_kernels": "This build of torch has no int8 kernels. Remedy: omit --quantization.",
    "export.damaged": (
        "{field} cannot be loaded ({reason}). Remedy: export the model again, or choose another device if that is "
        "the reason."
    ),
    "export.fixed_weights": (
        "{field} cannot be changed for {path}, an exported model. Remedy: remove it, or export the model again with "
        "another --quantization."
    ),
    "ensemble.too_few": "An ensemble needs at least two models, got {value}.",
    "ensemble.unsupported_member": "{field} cannot be part of an ensemble. Remedy: use models in PyTorch or ONNX.",
    "ensemble.different_models": (
        "{field} differ in {difference}, but the models of an ensemble must predict the same tokens. Remedy: use "
        "models that were trained with the same tokenizers (tokenizer.source, or model.init_from)."
    ),
}
# -- training ----------------------------------------------------------------------------------------------------------
TRAINING: dict[str, str] = {
    # files and overrides
    "yaml.invalid": "{field}{position}: invalid YAML ({reason}). Remedy: correct it.",
    "recipe.missing": "There is no recipe {field}. {folder} contains {names}. Remedy: correct the path.",
    "recipe.not_a_file": "{field} is not a regular file. {folder} contains {names}. Remedy: give the path of a recipe.",
    "recipe.unreadable": "The recipe {field} cannot be read ({reason}). Remedy: correct the path or its permissions.",
    "recipe.too_large": "{field} has more than {most:,} bytes, too many for a recipe. Remedy: correct the path.",
    "recipe.not_utf8": ("{field}, line {line}: not UTF-8 text. Remedy: correct the path, or save the recipe as UTF-8."),
    "recipe.not_a_mapping": (
        "{field} is not a recipe: it must be a mapping of sections, not {kind}. Remedy: correct the path, or write "
        "sections such as training: {{max_steps: 1000}}."
    ),
    "recipe.extends": "{field}: extends must be the name of one file, not {kind}. Remedy: write extends: base.yaml.",
    "recipe.extends_itself": "{field} extends itself. Remedy: correct its line `extends`.",
    "recipe.too_many_extended": (
        "{field} is the last of more than {most} recipes that extend each other. Remedy: join some of them."
    ),
    "recipe.foreign_sections": (
        "{field} is not a recipe: it has other sections than {sections}. Remedy: correct the line `extends` of "
        "{extended_by}, or this file."
    ),
    "override.syntax": "{value} is not an override. Remedy: write section.field=value.",
    "override.no_value": (
        "{field}= has no value. Remedy: write {field}=null for its default, or {field}='\"\"' for empty text."
    ),
    "override.repeated": "{field} replaces the earlier override {earlier}. Remedy: give only one of them.",
    "override.not_a_mapping": (
        "{field} cannot be set, because {parent} is {kind}, not a mapping. Remedy: set {parent} instead."
    ),
    # values of recipes
    "recipe.conflict": "{field}={value} is not possible with {other}. Remedy: {remedy}.",
    "recipe.requires": "{field}={value} requires {other}. Remedy: {remedy}.",
    "recipe.no_effect": "{field}={value} has no effect in a recipe. Remedy: {remedy}.",
    "recipe.rejected": "{field}={value} cannot be used ({reason}). Remedy: {remedy}.",
    "recipe.option_of_texts": (
        "{field} is not allowed: each line of a test set is translated unchanged, so that scores are comparable. "
        "Remedy: remove it, and pass it to recnmt translate ({flag})."
    ),
    "recipe.no_second_stage": (
        "{field}={value} leaves no step for the variant: both stages together have {steps} steps. Remedy: lower it, or "
        "raise training.max_steps."
    ),
    "recipe.no_baseline": (
        "{field}={value} trains the plain model from which a variant starts, but {model} is a plain model. Remedy: set "
        "it to null, or set model.type to a variant, e.g. biarn_transformer."
    ),
    "recipe.checkpoints_not_evaluated": (
        "{user} needs evaluations of the saved checkpoints, but {field}={value} does not match {other}. Remedy: set "
        "both to the same value."
    ),
    "recipe.test_name": (
        "{field}: {value} is not a name for a test set. Allowed are letters, digits, _, - and ., but not {taken}. "
        "Remedy: choose another name, e.g. newstest2014."
    ),
    "recipe.vocabulary_too_small": (
        "{field}={value} is smaller than the tokenizer's {symbols} symbols. Remedy: remove it, or train a smaller "
        "tokenizer."
    ),
    "recipe.missing_file": (
        "{field}={value} contains no {content} ({file} is missing). Remedy: train it first, or correct the folder."
    ),
    "recipe.cache_dir": "{field}={value} is not a writable folder ({reason}). Remedy: choose another, or remove it.",
    "recipe.too_few_positions": (
        "{field}={value} is more than the model's {positions} positions. Remedy: lower it, or raise "
        "model.fields.max_position_embeddings."
    ),
    "recipe.model_too_large": (
        "The {field} {value} has {parameters:,} parameters. Remedy: lower the largest of model.fields."
    ),
    "recipe.too_little_memory": (
        "The {field} {value} needs {needed:,.1f} GiB for {content}, but this machine has {available:,.1f} GiB. Remedy: "
        "use a smaller preset, or lower the largest of model.fields and tokenizer.vocab_size."
    ),
    # class paths in model.type
    "model_type.not_imported": (
        "model.type={field}: the module {module} cannot be imported ({reason}). Remedy: correct the name, install its "
        "package, or add its folder to PYTHONPATH."
    ),
    "model_type.missing_class": "model.type={field}: {module} has no {name}. Remedy: {remedy}.",
    "model_type.not_generating": (
        "model.type={field}: {name} is not a generating model class. Remedy: name a subclass of e.g. "
        "NMTTransformerForConditionalGeneration."
    ),
    "model_type.not_own": (
        "model.type={field}: {config} has model_type={value}, which is empty or belongs to another class. Remedy: give "
        "the class a configuration with a model_type of its own."
    ),
    # training
    "dataset.not_prepared": (
        "{field} must be a datasets.Dataset with the columns {columns}, not a {kind} without them. Remedy: make it "
        "with recnmt_hf.prepare_dataset, or train on a stream with transformers' Seq2SeqTrainer."
    ),
    "training.loss_not_finite": (
        "The loss became NaN or infinite by step {step}. Newest good checkpoint: {checkpoint}. Remedy: resume with a "
        "lower learning_rate, a longer warm-up, or max_grad_norm: 1.0."
    ),
    # output folders
    "output.has_files": (
        "{field} is not empty ({names}). Remedy: resume with --resume, delete the run with --overwrite, or choose "
        "another folder."
    ),
    "output.foreign_files": (
        "{field} contains files that recnmt did not create ({names}); nothing was deleted. Remedy: choose another "
        "folder."
    ),
    "output.not_a_run": (
        "{field} is not the folder of a training run ({names}); nothing was deleted. Remedy: choose another folder, or "
        "empty this one yourself."
    ),
    "output.no_space": (
        "{field} has {free} free, but this run needs about {needed} for its checkpoints ({checkpoints}) and the final "
        "model. Remedy: free space, lower training.keep_last and average.count, or choose another folder."
    ),
    "output.disk_full": "A file in {field} cannot be written ({reason}). {progress} Remedy: free space first.",
    "output.symbolic_link": "{field} is a symbolic link and will not be written. Remedy: copy the folder.",
    # checkpoints
    "checkpoint.none_intact": (
        "{field} has no intact checkpoint. {faults} Remedy: restore the files from a copy, or start again with "
        "--overwrite or in another folder."
    ),
    "checkpoint.none_complete": "{field} has no complete checkpoint. Remedy: train first, or correct the folder.",
    "checkpoint.no_metric": (
        "No checkpoint in {field} has a value of {value}. Remedy: give a metric that was evaluated, or average the "
        "last checkpoints."
    ),
    "checkpoint.damaged": (
        "The checkpoint {field} is damaged: {faults}. Remedy: delete it and average the others, or restore its files "
        "from a copy."
    ),
    "checkpoint.damaged_file": (
        "{field} is damaged ({reason}). Remedy: delete this checkpoint, or restore the file from a copy."
    ),
    "checkpoint.deleted": (
        "{field} was deleted while it was read, by a run that is still training. Remedy: average again."
    ),
    "average.no_checkpoint": "There is no checkpoint to average. Remedy: give at least one.",
    "average.different_parameters": (
        "{field} and {other} have different parameters ({names}). Remedy: average checkpoints of one run."
    ),
    "average.different_shapes": (
        "{field} has different shapes in the checkpoints. Remedy: average checkpoints of one run."
    ),
    # resuming
    "resume.fewer_steps": (
        "{field}={value} is less than the {steps} steps of {checkpoint}. Remedy: set it to {steps} or more, or start "
        "again with --overwrite or in another folder."
    ),
    "resume.baseline": (
        "{checkpoint} belongs to a baseline, but {field} is not set. Remedy: set it as before, or start again with "
        "--overwrite or in another folder."
    ),
    "resume.other_recipe": (
        "{checkpoint} was trained with another recipe, and these fields must not change: {changes}. Remedy: resume "
        "with the old values ({recipe}), or start again with --overwrite or in another folder."
    ),
    "resume.other_training_data": (
        "The training data differs from that of {checkpoint} ({old} sentence pairs before, {new} now). Remedy: restore "
        "the old data and settings ({recipe}), or start again with --overwrite or in another folder."
    ),
    "resume.other_validation_data": (
        "The validation data changed ({old} sentence pairs before, {new} now), but this run compares evaluations. "
        "Remedy: restore the old data, or set average.which: last and remove early_stopping_patience."
    ),
    "resume.other_batches": (
        "An update would have another number of batches than in {checkpoint} ({change}); the product must stay "
        "{batches}, so {field}={value} is not allowed. Remedy: {remedy}."
    ),
    "resume.other_model": (
        "The model of {field} differs from that of the recipe: {changes}. Remedy: resume with the old recipe, or start "
        "again with --overwrite or in another folder."
    ),
    # evidence
    "evidence.damaged": "{field} is not valid evidence of a model ({reason}). Remedy: delete it, or copy it again.",
    "test.not_tested": (
        "{field} has no translations of {name} (only of: {known}). Remedy: test that model first, with the same name "
        "of the test set."
    ),
    "test.other_sentences": (
        "{field} was tested on other sentences under the name {name}. Remedy: test it on the same files."
    ),
    "test.missing_translations": "{field} is missing. Remedy: test {model} again.",
}
# -- experiments -------------------------------------------------------------------------------------------------------
EXPERIMENTS: dict[str, str] = {
    "sweep.rows": (
        "{field} contains no rows. Remedy: write a mapping of names to changes of the recipe, such as `plain: "
        "{{model.type: nmt_transformer}}`."
    ),
    "sweep.axis": "{value} is not a field with values. Remedy: write section.field=value,value,...",
    "sweep.repeated_value": "A value of {field} is repeated. Remedy: give each value once.",
    "sweep.repeated_field": "A field is varied twice. Remedy: name each field once; use --seeds for seeds.",
    "sweep.nothing_to_vary": "There is nothing to vary. Remedy: give rows, fields with values, or seeds.",
    "sweep.row_name": (
        "The row name {value} is not allowed as name of a folder; it must not be empty, nor begin or end with a dot. "
        "Remedy: rename the row."
    ),
    "sweep.too_many_runs": "{value} runs are too many; at most {most} are allowed. Remedy: vary fewer values.",
    "sweep.same_folder": "Two runs would have the same folder. Remedy: use letters and digits in the names of rows.",
    "sweep.failed_runs": (
        "{count} of {runs} runs failed: {failures}. The results of the others are in {field}/sweep.tsv. Remedy: "
        "correct the cause and start the sweep again; finished runs are skipped."
    ),
    "sweep.no_score": "There is no score {value}. Remedy: choose one of {columns}.",
    "sweep.empty_score": "No run has the score {value}. Remedy: choose another score.",
    "logic.no_models": "{field} is empty. Remedy: add a model, e.g. models: {{hybrid: {{preset: logic_hybrid}}}}.",
    "logic.model_name": (
        "{field}: the name {value} is not allowed; it must be letters, digits, _, - and . Remedy: rename the model."
    ),
    "logic.warmup": "{field}={value} has no effect with schedule=plateau. Remedy: remove one of them.",
    "logic.too_few_pairs": (
        "{count} pairs are too few for training and validation. Remedy: raise {field} or data.most_operators."
    ),
    "logic.other_recipe": (
        "{field} contains a run of another recipe. Remedy: choose another folder, or delete the run with --overwrite."
    ),
    "logic.unreadable_result": "{field} cannot be read ({reason}). Remedy: delete it.",
    "logic.no_results": "There are no results to plot in {field}. Remedy: train a model.",
    "probe.no_vector": "The model has no vector {value}. Remedy: choose from {names}.",
    "probe.no_words": "{field}: the {side} has no words that the model knows. Remedy: remove it.",
    "probe.no_sentences": "There are no sentences. Remedy: give at least one.",
    "probe.empty_list": "{field}=[] is not allowed; it must be a list of numbers.",
    "probe.missing_task": (
        "{field} does not exist. The folder has these tasks: {names}. Remedy: correct the folder, or select those "
        "tasks."
    ),
    "probe.line": (
        "{field}, line {line}: expected split (tr, va, te), label and sentence, separated by tabs. Remedy: correct the"
        " line."
    ),
    "probe.empty_split": "{field} has no lines of the split {split}. Remedy: correct the file.",
    "probe.unknown_label": (
        "{field}: the label {value} of the split {split} does not occur in the split tr. Remedy: correct the file."
    ),
}
# -- analysis ----------------------------------------------------------------------------------------------------------
ANALYSIS: dict[str, str] = {
    "inspect.blank": "The {field} is blank. Remedy: give one with at least one word.",
    "inspect.no_index": "{field}={value} does not exist; there are {count}, counted from 0.",
    "inspect.no_direction": "{field}={value} does not exist in this model. Remedy: choose {names}.",
    "inspect.no_global_state": (
        "The {value} model has neither capsules nor a gate of a global state. Remedy: use a gret with "
        "use_global_state=true and global_capsule or global_gate."
    ),
    "inspect.no_recurrent_positions": (
        "The {value} model has no recurrent positional embeddings. Remedy: use an rpe_transformer with rpe_encoder or "
        "rpe_decoder, an rpe_type, and rpe_dim above 0."
    ),
    "inspect.no_attentive_recurrence": (
        "The {value} model (recurrence_encoder_type={kind}) has no attentive recurrence. Remedy: use a "
        'biarn_transformer with recurrence_encoder_type "biarn" or "arn".'
    ),
    "inspect.no_onlstm": (
        'The {value} model has no ON-LSTM layers. Remedy: use an onlstm_transformer with "onlstm" in '
        "encoder_layer_types."
    ),
    "inspect.nothing": (
        "A {value} model has nothing to inspect. Remedy: use a model of one of these families: {families}."
    ),
    "curve.missing": (
        "{field} has no curve: neither a complete checkpoint nor a model with a log. Remedy: give the folder of a "
        "training run that has saved a checkpoint."
    ),
    "plot.ending": "{field} has no ending of a picture. Remedy: use {endings}.",
}
# -- hub ---------------------------------------------------------------------------------------------------------------
HUB: dict[str, str] = {
    "card.template": (
        "The card template {field} failed ({reason}). Remedy: correct it; the default template is {default}."
    ),
    "card.link": "{field} is a symbolic link, which is not overwritten. Remedy: delete the link.",
    "card.code": (
        "The code of the card fails ({reason}). Remedy: check that the folder has a complete model with its "
        "tokenizers, as written by training or save_pretrained."
    ),
    "card.table": "{field} does not contain a table ({reason}). Remedy: pass a sweep.json, or a list of rows.",
    "model.no_config": (
        "{field} has no config.json. Remedy: pass the folder of a run, or of a model, as written by training or "
        "save_pretrained."
    ),
    "model.adapter": (
        "{field} contains an adapter. Remedy: merge it (merge_and_unload) and save the whole model, or push it with "
        "peft."
    ),
    "weights.pickled": (
        "{field} is pickled, and loading it may run code. Remedy: if you trust it, load it with "
        "MarianMTModel.from_pretrained and save it again as safetensors."
    ),
    "marian.parameters": (
        "The MarianMT model has another architecture (unknown parameters: {unknown}; missing: {missing}). Remedy: "
        "use a standard MarianMT model."
    ),
    "export.family": (
        "{engine} does not support {family}. Remedy: export a base Transformer (nmt_transformer), or run this model "
        "with `recnmt translate` (--quantization int8)."
    ),
    "export.config": (
        "{engine} does not support {field}={value}. Remedy: train a model without it, or run this one with `recnmt "
        "translate`."
    ),
    "export.symbols": "Two rows of the embedding have the same name. Remedy: rename the tokenizer's symbol <row N>.",
    "export.foreign": (
        "{field} is a {family}, which is not a model of recnmt_hf. Remedy: convert it with recnmt import-marian, or "
        "export it with Optimum."
    ),
    "export.torch": "torch {value} unrolls recurrences in exported graphs. Remedy: upgrade torch, e.g. to 2.13.",
    "export.onnx": (
        "torch cannot export the {field} of this model ({reason}). Remedy: use another release of torch and "
        "onnxscript, or run the model with `recnmt translate` (--quantization int8)."
    ),
    "export.logits": (
        "The logits of the graphs differ from the model's by {distance}, so nothing was written. Remedy: use another "
        "release of torch, onnxscript and onnxruntime."
    ),
    "publish.translations": "{field} of evidence.json is not a file of translations. Remedy: test the model again.",
    "publish.link": "{field} is a symbolic link, which is not published. Remedy: replace it with the file.",
    "publish.file": "{field} is not a file that may be published. Remedy: remove it.",
    "publish.token": (
        "{field} seems to contain an access token of the Hub. Remedy: remove it, and revoke it at "
        "huggingface.co/settings/tokens if it may be known to others."
    ),
    "hub.name": "{field} is not a valid name of a repository. Remedy: write user/name with letters, digits, -, _ and .",
    "hub.offline": "HF_HUB_OFFLINE is set. Remedy: unset it, or only write the folder (--dry-run).",
    "hub.no_token": "There is no access token of the Hub. Remedy: log in (`hf auth login`), or set HF_TOKEN.",
    "hub.not_found": (
        "The token cannot write to {field} on the Hub ({reason}). Remedy: correct the name, or use a token with "
        "write access."
    ),
    "hub.refused": "The Hub rejected the upload to {field} ({reason}). Remedy: {remedy}.",
    "hub.connection": (
        "The upload to {field} failed, because {endpoint} cannot be reached ({reason}). Remedy: check the connection "
        "and try again; uploaded files are not sent again."
    ),
    "hub.card": (
        "The Hub rejected the card ({reason}). Nothing was uploaded. Remedy: correct it; a licence must be an "
        "identifier such as apache-2.0, cc-by-4.0 or other."
    ),
}
# -- commands ----------------------------------------------------------------------------------------------------------
COMMANDS: dict[str, str] = {
    "usage.inputs": "Pass {inputs}.",
    "usage.requires": "{field} requires {other}. Remedy: add {other}.",
    "usage.excludes": "{field} and {other} cannot be combined. Remedy: remove one of them.",
    "usage.duplicate": "{field}: {value} repeats {first}. Remedy: give each value once.",
    "usage.setting": "{field}: {value} is not a setting. Remedy: write name=value, such as no_repeat_ngram_size=3.",
    "usage.encoding": "{field} is not valid UTF-8 ({reason}). Remedy: correct it.",
    "usage.no_file": "There is no file {field}. Remedy: correct the path.",
    "usage.empty_file": "{field} is empty. Remedy: pass a file with at least one {content}.",
    "links.lines": "{field} has {lines} lines for {pairs} pairs. Remedy: pass the gold file of these pairs.",
    "links.beyond": (
        "{field} has a link beyond the {source} source and {target} target words. Remedy: pass the gold file of "
        "these sentences, with the source first. Positions that count from 1 need --one-based."
    ),
    "average.no_folder": "The folder {value} does not exist. Remedy: pass folders of checkpoints, or of one run.",
    "average.output": "The output {field} is inside {folder}, which is averaged. Remedy: choose another folder.",
    "evaluate.lines": (
        "{field} has {lines} lines, and {other} has {others}. Remedy: pass line-aligned files of the same test set."
    ),
    "export.quantization": (
        "{field}={value} is not supported for ONNX. Remedy: leave it out, and quantize the graphs with ONNX Runtime."
    ),
    "inspect.no_effect": (
        "{field} has no effect on the subject {subject}. Remedy: remove it, or choose another --subject."
    ),
    "parameters.no_value": "{value} in {field} has no value. Remedy: write field=value (null for none).",
    "parameters.unknown_model": "There is no model type {value}. Remedy: use one of {models}.",
    "parameters.unknown_field": "The configuration of {field} has no field {names}. Remedy: correct it.",
    "parameters.marian": "MarianConfig: {reason}. Remedy: correct the fields.",
    "records.line": (
        "{field} is not a JSON object with source and tokens ({reason}). Remedy: pass the output of `recnmt "
        "translate --format jsonl`."
    ),
    "records.empty_source": "{field} has tokens for a blank source. Remedy: remove the line.",
    "records.unknown_token": (
        "{field} has the token {value}, but the model has tokens 0 to {most}. Remedy: score with the model that "
        "translated."
    ),
    "records.split": (
        "{field} has the tokens of several sentences, which have no joint probability. Remedy: translate with "
        "--split-sentences never and without --on-long split."
    ),
    "benchmark.family": "{field} does not support {value}. Remedy: use one of {families}.",
    "benchmark.folder": "{field} has no {file}. Remedy: pass src/recnmt_hf/models of another version.",
    "benchmark.weights": "{field} has a {family} with other weights ({reason}). Remedy: choose another version.",
    "output.closed": (
        "Standard output is closed, so the results would be lost. Remedy: leave it open, or redirect it to a file."
    ),
    "system.memory": "{reason}. Remedy: use smaller batches (--max-tokens), fewer beams, or a smaller data type.",
    "system.open_files": "{reason}. Remedy: raise the limit (`ulimit -n`), or close programs with many open files.",
    "system.space": "{field} cannot be written ({reason}). Remedy: free some space, or choose another place.",
    "system.file": "{field}: {reason}. Remedy: correct the path, or the type and permissions of the file.",
}

for messages in (VALUES, DATA, METRICS, INFERENCE, TRAINING, EXPERIMENTS, ANALYSIS, HUB, COMMANDS):
    MESSAGES.update(messages)
