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


MESSAGES |= {
    # -- values and options --------------------------------------------------------------------------------------------
    "option.value": "{field}={value} is not allowed; it must be {allowed}. {remedy}.",
    "option.unknown": "There is no field {field}. {remedy}.",
    "option.mapping": "{field} must be a mapping of names to values, not {kind}. Write {field}: {{name: value}}.",
    "option.empty": "{field} is empty. Remove it, or give it a value.",
    "model.json": "{field} is not a valid JSON object ({reason}). Copy it again from the original model.",
    "model.remote_code": "The {what} {field} contains Python code, which was not run. If you trust it, pass "
    "--trust-remote-code (trust_remote_code=True). Commands without this option cannot load it.",
    "model.not_seq2seq": "{field} is a {config}. Pass the folder or id of a sequence-to-sequence model.",
    "model.not_found": "The {what} {field} was not found as a folder or on the Hub ({reason}). Correct the name, or "
    "check the connection and the permissions of the access token.",
    "model.not_loaded": "The {what} {field} cannot be loaded ({reason}). Pass a folder from save_pretrained.",
    "weights.damaged": "The weights in {field} are damaged ({reason}). Copy them again, or use an earlier checkpoint.",
    "weights.shapes": "The weights in {field} do not have the shapes of its config.json. Use weights and "
    "config.json of the same model.",
    "tokenizer.missing": "{field} has no tokenizer.json or tokenizer_config.json. Copy them from the original model, "
    "or write them with the tokenizer's save_pretrained.",
    "package.missing": '{purpose} requires the package {package}. Run pip install "recnmt-hf[{extra}]".',
    # -- demo ----------------------------------------------------------------------------------------------------------
    "demo.no_models": "There is no model to show. Pass one or more folders of models.",
    "demo.same_model": "The model {field} is given twice. Pass it once.",
    "demo.host": "{field} is not an address of this machine ({reason}). Use 127.0.0.1, or 0.0.0.0 for other machines.",
    "demo.port": "{field} cannot be used: the port is taken or reserved. Choose another one with --port.",
    "demo.too_many": "{field}={value} is not allowed; it must be at most {most:,}. Choose a smaller number.",
    "demo.upload_again": "The upload of {field} was deleted. Upload the file again.",
    "demo.too_long": "{field} has {count:,} characters, and the limit is {most:,}. Shorten it.",
    "demo.file_size": "{field} has more than {most:,} bytes. Split it into smaller files.",
    "demo.too_many_lines": "{field} has more than {most:,} lines. Split it into smaller files.",
    # -- data ----------------------------------------------------------------------------------------------------------
    # files and folders
    "file.no_name": "The name of a file is empty. Pass its path.",
    "file.missing": "{field} does not exist. {folder} contains {names}. Correct the path.",
    "file.no_folder": "{field} does not exist, because the folder {folder} does not. Correct the path.",
    "file.missing_folder": "The folder {field} does not exist. Correct the path.",
    "file.broken_link": "{field} is a link to {target}, which does not exist. Correct the link.",
    "file.is_folder": "{field} is a folder. Pass the path of a file.",
    "file.unreadable": "{field} cannot be read ({reason}). Correct its path or permissions.",
    "file.empty": "{field} is empty. Pass a file with content.",
    "file.too_large": "{field} is larger than any file of this kind, or expands to more. Correct the path.",
    "file.line_too_long": "{field}, line {line}: more than {most:,} bytes. Pass text with one sentence per line.",
    "file.not_utf8": "{field}, line {line}: not UTF-8 ({reason}). Run e.g. `iconv -f {encoding} -t UTF-8`.",
    "file.damaged_gzip": "{field} is truncated or damaged after line {line}. Copy or compress it again.",
    "input.closed": "Standard input is closed. Pass a file, or text through a pipe.",
    "output.not_writable": "{field} cannot be written ({reason}). Choose a writable place with enough space.",
    "output.is_file": "{field} is a file, but the output is a folder. Choose a new folder.",
    "output.not_empty": "{field} is not empty. Choose a new folder.",
    "output.has_model": "{field} contains a model ({file}). Choose another folder.",
    "output.is_input": "{field} is also an input and would be overwritten. Choose another output file.",
    "output.locked": "{field} is in use ({owner}). Try again when that process has finished.",
    "output.in_use": "Another run ({owner}) writes to {field}. Wait for it, stop it, or choose another output folder.",
    # corpora
    "corpus.kinds": "A corpus needs exactly one of source, tsv, jsonl, dataset, generated and sacrebleu, got "
    "{kinds}. Write several corpora as a list.",
    "corpus.needs": "{field}={value} is only allowed with {needed}. Set that, or remove {field}.",
    "corpus.several_targets": "{field} lists {value}. Only a test set can have several references. Pass one file.",
    "corpus.references": "The corpora of a test set have different numbers of references ({counts}). Make them equal.",
    "corpus.one_side": "{field} is missing. Text files need both source and target.",
    "corpus.not_a_list": "{field} must be a list of corpora, got {kind}. Write e.g. [{{source: a.en, target: a.de}}] "
    "or [{{generated: train}}].",
    "corpus.generated_languages": "The generated corpus is English-German, not {languages}. Set source_lang: en and "
    "target_lang: de, or use another corpus.",
    "corpus.same_languages": "Source and target of {field} are the same column, since source_lang and target_lang are "
    "both {language}. Set source_column and target_column.",
    "corpus.different_lengths": "{source} has {sources} lines, but {target} has {targets}. Align the files line by "
    "line; look for the first line without a translation.",
    "corpus.empty_sentence": "{field}, {unit} {number}: blank sentence. Remove the pair from both sides, or skip such "
    'pairs with on_empty: skip (recipe) or on_empty="skip" (Python).',
    "corpus.no_pairs": "{field} contains no sentence pairs. Pass at least one.",
    "corpus.all_blank": "The corpus contains no sentence pairs. Check its files and {field}={value}.",
    "corpus.all_too_long": "All {pairs} sentence pairs exceed max_source_length={max_source_length}, "
    "max_target_length={max_target_length} or max_length_ratio. Raise these limits, or check the corpus.",
    "corpus.tsv_fields": "{field}, line {line}: got {count} fields. Write source and target, separated by one tab.",
    "corpus.json_line": "{field}, line {line}: expected a JSON object with text for {source!r} and {target!r} "
    '({reason}). Write lines like {{"{source}": "..", "{target}": ".."}}.',
    "corpus.alignment_lines": "{field} has {value} lines, but {text} has {lines}. Pass one line of links for each "
    "pair; it may be empty.",
    "corpus.link_beyond": "{field}: the link {value} is beyond {source} source and {target} target {units}. Pass links "
    "of these texts, positions from 0, and set alignment_units if they count other units.",
    "corpus.killed_process": "One of {value} tokenization processes was killed. Reduce {field} if memory is short.",
    "corpus.depths": "{field}={value} is not allowed; it must be above max_depth={max_depth}.",
    "corpus.grammar_too_small": "The grammar has too few sentences of depth {depth}: {count} of {value} after {tries} "
    "tries. Request fewer sentences, or allow more depth.",
    # dependency trees
    "test_set.unknown": "{field}={value} is not a test set of sacrebleu, like {near}. sacrebleu --list prints all.",
    "test_set.pair": "{field}={value} is not a language pair of {name}. Use one of {pairs}.",
    "test_set.not_downloaded": "{field}={value} cannot be downloaded ({reason}). Run sacrebleu -t {value} -l {pair} "
    "--echo src where there is a connection, and copy its folder ~/.sacrebleu to {folder}, or name files in source and "
    "target.",
    "tag.not_a_word": "{field}={value} is not a tag. Write text without spaces, such as >>de<<.",
    "tag.taken": "{field}={value} is given twice, or is a control token. Remove it.",
    "tag.unknown": "{field}={value} is split into {symbols} symbols. Add it to tokenizer.tags if the run trains "
    "its tokenizer; otherwise use a tokenizer that contains it.",
    "tag.excluded": "{field}={value} cannot be combined with {other}, whose positions count words. Remove one of them.",
    "conllu.columns": "{field}: got {count} columns. Write the ten columns of CoNLL-U, separated by tabs.",
    "conllu.word_number": "{field}: the word has the ID {value}, expected {expected}. Number the words of a sentence "
    "1, 2, 3, ..., and separate sentences by a blank line.",
    "conllu.head": "{field}: the HEAD {value} is not the number of a word. Parse the file; the HEAD of a root is 0.",
    "tree.not_a_list": "{field} is {value}. Pass a list.",
    "tree.wrong_value": "{field} contains {value}. Pass {allowed}.",
    "tree.lengths": "{words} words, {heads} heads and {relations} relations. Pass one head and one relation for each "
    "word.",
    "tree.blank_word": "word {number} is blank. Remove it from the tree.",
    "tree.head_beyond": "the head of word {number} ({word}) is {value}, but the words are numbered from 1 to {count}, "
    "and the head of a root is 0. Correct it.",
    "tree.cycle": "the heads of word {number} ({value}) form a cycle. Correct them.",
    "trees.too_few": "{field}: the tree is missing, because {trees} has fewer trees. Pass one tree for each line that "
    "is not blank.",
    "trees.too_many": "{field}: {text} has only {lines} lines. Pass one tree for each line that is not blank.",
    "trees.word_count": "{field}: {words} words, but the tree ({trees}, line {row}) has {count}. Separate the words by "
    "spaces as they are in the tree.",
    "trees.no_column": "{field}: {value} is missing. A corpus with tree_columns needs the columns {names}.",
    "trees.none": "{field} has no dependency trees, but training this model on several processes requires them. Set "
    "source_trees or tree_columns, or training.ddp_find_unused_parameters=true.",
    "trees.slow_tokenizer": "{field} does not know the word of each token, which dependency trees require. Use a fast "
    "tokenizer (tokenizer.json).",
    "trees.no_relations": "{field} reads dependency trees, but its relations.json is missing. Copy it from the "
    "original model.",
    "trees.other_relations": "{field} has {value} relations, but the model has {rows}. Use the file of this model.",
    "trees.not_read": "{field} has no effect, because the model {model} reads no dependency trees. Remove it.",
    "relations.damaged": "{field} is damaged ({reason}). Copy it again from the original model.",
    "dataset.not_loaded": "The dataset {field} cannot be loaded: {reason}. Check name, config, split and connection.",
    "dataset.no_column": "The dataset {field} has no column {value}, only {columns}. Correct source_lang and "
    "target_lang, or set source_column and target_column.",
    "dataset.not_text": "The dataset {field}, row {row}: column {column!r} must contain text, got {value}. Set "
    "source_column and target_column to columns of sentences.",
    "tokenizer.no_dropout": "{field}={value} is not supported by this tokenizer. Use one of kind bpe, or set it to 0.",
    # translation with several processes
    "translate.streams": "Several processes need --input and --output that are files. Pass files, or use one process.",
    "translate.missing_parts": "{field} lacks {value} parts of the translation. Run the same command again: "
    "finished parts are kept.",
    # prepared data
    "prepare.other_data": "{field} has data that was prepared with other {changed}. Choose another folder, or delete "
    "this one.",
    "prepare.nothing_left": "All {read} pairs for {field} were removed ({removed}). Relax the length limits or the "
    "filters.",
    "prepare.no_manifest": "{field} has no prepared data, or its preparation was interrupted. Run recnmt prepare "
    "again.",
    "prepare.damaged_manifest": "{field} is not the manifest of prepared data, or is damaged. Run recnmt prepare again "
    "into an empty folder.",
    "prepare.no_shard": "The shard {field} is missing. Copy it again, or run recnmt prepare into an empty folder.",
    "prepare.damaged_shard": "The shard {field} was altered or truncated ({reason}). Copy it again, or run recnmt "
    "prepare into an empty folder.",
    "prepare.other_recipe": "{field} was prepared with another recipe; these differ (prepared -> recipe): {changes}. "
    "Prepare the data again, or change the recipe.",
    "prepare.part": "{field}={value} is not a part. Write the number of the part and the number of parts, e.g. 3/64.",
    "batches.lengths": "There are {sources} source and {targets} target lengths. Pass one of each per sentence pair.",
    "batches.too_few_pairs": "{pairs} sentence pairs are too few for {value} processes. Use fewer processes or more "
    "data; check whether length limits or weights of corpora leave out pairs.",
    # tokenizers
    "tokenizer.byte_fallback": "{field}={value} is only supported with kind=bpe, got {kind}. Change one of them.",
    "tokenizer.vocabulary_too_small": "{field}={value} must be above {reserved}, the number of control tokens and "
    "bytes. Use a few thousand for BPE, or at least the size of the alphabet for characters.",
    "tokenizer.single_text": "{field} must be a list of sentences, got one text ({value}). Put it into a list.",
    "tokenizer.not_text": "{field}: item {number} must be text, got {value}. Pass sentences.",
    "tokenizer.no_text": "{field} contain no text to train a tokenizer on. Pass at least one sentence.",
    "tokenizer.no_control_token": "The tokenizer in {field} has no {name}. Set tokenizer.{name} and save it again.",
    "tokenizer.no_padding": "The {field} has no padding token. Set tokenizer.pad_token to the one used in training.",
    "tokenizer.missing_settings": "The {field} has no padding token. Copy the missing {file} from the original model.",
    "tokenizer.too_many_symbols": "The {field} has {value} symbols, but the model's embedding has {rows} rows. Use the "
    "tokenizer that the model was trained with, or resize the embeddings.",
    "tokenizer.other_size": "The {field} has {value} symbols, but the model's embedding has {rows} rows. Use the "
    "tokenizer that the model was trained with, or disable this check with check=False (Python).",
    "tokenizer.other_symbols": "The {field} has other symbols than the one that the model was trained with. Use the "
    "tokenizer that training saved. After training again, call stamp_tokenizers(model.config, ...) and save the "
    "model. check=False disables this check (Python).",
    "tokenizer.other_encoding": "The {field} has the same symbols as the one that the model was trained with, but "
    "encodes text differently (tokenizer.json or its settings were changed). Use the tokenizer that training saved. "
    "After training again, call stamp_tokenizers(model.config, ...) and save the model. check=False disables this "
    "check (Python).",
    "tokenizer.padding_ids": "The padding ids differ ({ids}), but the model has one id for both sides. Use tokenizers "
    "with the same padding id; `recnmt tokenizer` sets it to 0.",
    "tokenizer.other_end": "The {field} ends sentences with token {value}, the model with {trained}. Use the tokenizer "
    "that the model was trained with, or disable this check with check=False (Python).",
    "model.other_control_token": "{field} is {value} in generation_config.json, but {trained} in config.json. Write "
    "the one used in training into both, or disable this check with check=False (Python).",
    "model.no_end_token": "The model has no {field}, so it could not end a sentence. Write the one used in training "
    "into config.json, or disable this check with check=False (Python).",
    "model.token_ids": "{field}={value} must be a token id or a list of them. Correct it (config.json, "
    "generation_config.json, recnmt_engine.json), or export the model again.",
    # -- metrics -------------------------------------------------------------------------------------------------------
    "metric.nothing_to_score": "{field} is an empty list. Pass at least one sentence.",
    "metric.reference_counts": "{field}: the numbers of references differ: {value}. Pass the same number for each "
    "sentence.",
    "metric.unusable_tokenizer": "{field}={value} cannot be used ({reason}). Install the package that it requires, or "
    "choose another tokenizer.",
    "metric.language": "{field}={value} is not a language code. Pass a code of two or three letters, such as de.",
    "metric.edges": "{field}={value} is not allowed; the edges must be at least 1 and increase, such as 15 30 45.",
    "metric.repeated_systems": "Several systems have the same name: {value}. Give each a different name.",
    "metric.too_few_systems": "A comparison needs a baseline and at least one other system. Pass two or more.",
    "metric.run_counts": "{field} has {value} runs, but the baseline has {expected}. Pass runs with the same seeds.",
    "alignment.not_a_link": "{field}: {value} is not a link. Write e.g. 0-1 (source-target) or 0p1 (possible).",
    "alignment.position_below_one": "{field}: {value} has a position below 1. Omit one_based for positions from 0.",
    "alignment.sure_not_possible": "The possible links lack the sure links {value}. Add them to the possible links.",
    "alignment.no_links": "Neither the alignments nor the gold alignments have links, so the error rate is undefined. "
    "Check both files.",
    # -- inference -----------------------------------------------------------------------------------------------------
    "option.given_twice": "{field} and {other} set the same option. Pass only one of them.",
    "option.too_many_hypotheses": "{field}={value} must not exceed beams={beams}. Use more beams or fewer hypotheses.",
    "option.no_length": "{field}={value} with max_length_factor=0 allows no token. Set one of them above 0.",
    "option.language": "{field}={value} is not a language code. Use letters, digits, _ and -, such as en, de or zh-CN.",
    "pipeline.no_model": "{field} is missing; the task {value} has no default. Pass a folder or a model id.",
    "language.unknown": "{field}={value} is not a language of this model. Use one of its codes: {known}.",
    "language.missing": "This model translates into several languages. Set {field} (tgt_lang, --target-lang) to one of "
    "{known}.",
    "language.none": "{field}={value} has no effect, because the files of this model name no languages. Remove it; for "
    "a model that reads instructions, set source_prefix.",
    "language.two_targets": "{field}: the sentence itself names the target language {value}, but target_lang is "
    "{other}. Remove one of them.",
    "model.no_start_token": "The model has no {field}, so its decoder cannot start. Set target_lang, or write the one "
    "used in training into generation_config.json.",
    "option.alignments_of_parts": "{field}=true is not supported with on_long=split, because each part has its own "
    "positions. Use on_long=error, or split the sentences yourself.",
    "option.seed_without_sampling": "{field}={value} has no effect without sampling. Add --generate do_sample=true.",
    "generate.set_by_option": "{field} is controlled by the option {option}. Set that option instead.",
    "generate.not_settable": "{field} cannot be set, because the translator sets it. Remove it.",
    "generate.rejected": "{field}={value} was rejected by {engine} ({reason}). Correct it, or remove it.",
    "engine.unsupported": "{field} is not supported by {engine}. Remove it, or use one model in PyTorch.",
    "engine.samples_without_beams": "{field}={value} is not supported when CTranslate2 samples. Use --beams 1.",
    "sentence.not_a_list": "{field} must be several sentences, got {value}. Pass a list.",
    "sentence.not_text": "{field} is {value}. Pass text.",
    "sentence.half_character": "{field}: {value} is an unpaired surrogate. Check the encoding of the input.",
    "sentence.wrong_keys": "A sentence has the keys {value}. Pass text, or a mapping with text and optionally prefix. "
    "Models that read trees also accept tokens, heads and relations instead of text.",
    "sentence.too_long": "{field} has {length} tokens; the maximum is {limit}: {value}. Shorten it, or set on_long "
    "(--on-long) to split or truncate.",
    "sentence.cannot_split": "{field} has a character of more than {limit} tokens. Raise max_source_length.",
    "prefix.of_empty_sentence": "{field} is empty, so its translation cannot begin with {value}. Leave this prefix "
    "empty, or check that sentences and prefixes have the same order.",
    "prefix.too_long": "{field} has {length} tokens, but the model can generate only {limit}. Shorten it.",
    "prefix.counts_differ": "There are only {value} {field}, but more {other}. Pass one prefix for each sentence.",
    "pair.counts_differ": "{field} has {value} entries, but {other} has {expected}. Pass lists of the same length.",
    "pair.empty": "{field} is empty, so it cannot be scored or aligned. Remove this pair.",
    "pair.blank": "{field}, line {value} is blank, so it cannot be scored or aligned. Remove the line from both files.",
    "pair.too_long": "{field} has {length} {side} tokens; the model's maximum is {limit}. Shorten it.",
    "token.unknown_id": "{field}: {value} is not a token id from 0 to {most}. Use the token ids of this model.",
    "alignment.out_of_range": "{field}={value} does not exist in this model, which has 0 to {most}.",
    "alignment.no_attention": "The model returns no attention. Load it with attn_implementation='eager'.",
    "alignment.other_memory": "The decoder does not attend to source words. Use a model whose decoder does.",
    "tokenizer.without_offsets": "{field} returns no token positions. Load its fast version (tokenizer.json).",
    "model.missing": "{field} has no config.json. Pass the folder of a run or from save_pretrained, or a model id.",
    "model.elsewhere": "{field} is not a model's folder, but {near} is. Pass that folder.",
    "model.wrong_weights": "The weights in {field} do not match its config.json ({faults}). Use weights and "
    "config.json of the same model.",
    "model.weights_without_values": "These weights have no values: {names}. Load the model's weights.",
    "model.weights_not_finite": "These weights are NaN or infinite: {names}. Use an earlier checkpoint, or another "
    "copy.",
    "model.not_inspectable": "{field} is {kind}, which gives no alignments or attention. Use one PyTorch model.",
    "device.unavailable": "{field}={value} cannot be used ({reason}). Available: {available}.",
    "quantization.on_cpu_in_float32": "{field}={value} is not supported with int8 quantization. Use CPU and float32.",
    "quantization.no_kernels": "This build of torch has no int8 kernels. Omit --quantization.",
    "export.damaged": "{field} cannot be loaded ({reason}). Export the model again, or choose another device.",
    "export.fixed_weights": "{field} is not supported for the exported model {path}, whose weights have a fixed type. "
    "Remove it, or run recnmt convert with another --quantization.",
    "option.not_options": "options must be DecodingOptions, got {value}. Pass DecodingOptions(...), or single "
    "options by name.",
    "shortlist.line": "{field}: {value} is not a line of a shortlist. Write `target source probability`.",
    "shortlist.other_vocabulary": "{field} has no tokens of this model's vocabularies. Make it with `recnmt align "
    "--shortlist` for this model.",
    "shortlist.output_layer": "{field} does not support shortlists: its output layer is not linear. Omit it.",
    "shortlist.spaces": "A shortlist cannot have the token {value!r}, which contains a space or ends a line. Use a "
    "model with another tokenizer.",
    "shortlist.search": "{field} cannot be combined with sampling or settings of generate. Remove them, or omit the "
    "shortlist.",
    "shortlist.backend": "{field} is not supported by a model that is {kind}. Use a model in PyTorch, or omit it.",
    "ensemble.too_few": "An ensemble needs at least two models, got {value}. Pass two or more.",
    "ensemble.unsupported_member": "{field} is not supported in an ensemble. Use models in PyTorch or ONNX.",
    "ensemble.different_models": "The models {field} differ in {difference}, but an ensemble must predict the same "
    "tokens. Use models trained with the same tokenizers (tokenizer.source or model.init_from).",
    # -- training ------------------------------------------------------------------------------------------------------
    "guided_alignment.model": "Guided alignment cannot read the attention of {field}. Use a model of this package "
    "whose decoder attends to source words, or set guided_alignment.weight to 0.",
    # files and overrides
    "yaml.invalid": "{field}{position}: invalid YAML ({reason}). Correct it.",
    "recipe.not_a_mapping": "{field} must be a mapping of sections, not {kind}. Correct the path, or write sections "
    "such as training: {{max_steps: 1000}}.",
    "recipe.extends": "{field}: extends must be the name of one file, not {kind}. Write extends: base.yaml.",
    "recipe.extends_itself": "{field} extends itself. Correct its line `extends`.",
    "override.syntax": "{value} is not an override. Write section.field=value.",
    "override.no_value": "{field}= has no value. Write {field}=null for its default, or {field}='\"\"' for empty text.",
    "override.not_a_mapping": "{field} cannot be set, because {parent} is {kind}, not a mapping. Set {parent} instead.",
    # values of recipes
    "recipe.conflict": "{field}={value} is not supported with {other}. {remedy}.",
    "recipe.requires": "{field}={value} requires {other}. {remedy}.",
    "recipe.no_effect": "{field}={value} has no effect in a recipe. {remedy}.",
    "recipe.rejected": "{field}={value} cannot be used ({reason}). {remedy}.",
    "recipe.option_of_texts": "{field} is not supported for test sets. Remove it, and pass {flag} to recnmt translate.",
    "recipe.no_second_stage": "{field}={value} must be below {steps}, the number of steps of both stages together. "
    "Raise training.max_steps.",
    "recipe.no_baseline": "{field}={value} trains the baseline of a variant, but {model} is a plain model. Set it to "
    "null, or model.type to a variant, e.g. biarn_transformer.",
    "recipe.checkpoints_not_evaluated": "average.which=best needs an evaluation of each checkpoint, but {field}="
    "{value} does not match {other}. Set both to the same value.",
    "recipe.unnamed_test": "{field} has no name. Write a mapping, such as test: {{name: {{source: .., target: ..}}}}, "
    "or a list of test sets of sacrebleu.",
    "recipe.test_tags": "{field}: the corpora have different target tags. Make a test set for each.",
    "recipe.test_name": "{field}: {value} is not allowed as the name of a test set. Use letters, digits, _, - and ., "
    "but not {reserved}.",
    "recipe.vocabulary_too_small": "{field}={value} is below the tokenizer's size, {symbols}. Remove or raise it.",
    "recipe.missing_file": "{field}={value} has no {content} ({file} is missing). Correct it, or train it first.",
    "recipe.too_few_positions": "{field}={value} exceeds the model's {positions} positions. Lower it, or raise "
    "model.fields.max_position_embeddings.",
    "recipe.too_little_memory": "The {field} {value} needs {needed:,.1f} GiB for {content}; {available:,.1f} GiB are "
    "available. Use a smaller preset, or lower the largest of model.fields and tokenizer.vocab_size.",
    # class paths in model.type
    "model_type.not_imported": "model.type={field} cannot be imported ({reason}). Correct the name, install its "
    "package, or add its folder to PYTHONPATH.",
    "model_type.not_generating": "model.type={field} cannot generate. Name a subclass of e.g. "
    "NMTTransformerForConditionalGeneration.",
    "model_type.not_own": "model.type={field}: {config} has model_type={value}, which is empty or taken. Give the "
    "class a configuration with its own model_type.",
    # training
    "dataset.not_prepared": "{field} must be a datasets.Dataset with the columns {columns}, not a {kind}. Make it with "
    "recnmt_hf.prepare_dataset; use transformers' Seq2SeqTrainer for streams.",
    "training.ema_sharded": "{field}={value} needs the whole model in each process, which FSDP and DeepSpeed do not "
    "have. Remove it; average.count averages checkpoints instead.",
    "training.loss_not_finite": "The loss became NaN or infinite by step {step}. Newest good checkpoint: {checkpoint}. "
    "Resume with a lower learning_rate, a longer warm-up, or max_grad_norm: 1.0.",
    # output folders
    "output.has_files": "{field} is not empty ({names}). Use another folder, --resume, or --overwrite (deletes the "
    "run).",
    "output.foreign_files": "{field} contains files that recnmt did not create ({names}); nothing was deleted. Choose "
    "another folder.",
    "output.not_a_run": "{field} is not a training run ({names}); nothing was deleted. Choose another folder, or empty "
    "this one yourself.",
    "output.no_space": "{field} has {free} free; checkpoints ({checkpoints}) and the final model need about {needed}. "
    "Free space, lower training.keep_last and average.count, or choose another folder.",
    "output.disk_full": "A file in {field} cannot be written ({reason}). {progress} Free space first.",
    "output.symbolic_link": "{field} is a symbolic link and will not be written. Copy the folder.",
    # checkpoints
    "checkpoint.none_intact": "{field} has no intact checkpoint. {faults} Restore the files, or start again with "
    "--overwrite or in another folder.",
    "checkpoint.none_complete": "{field} has no complete checkpoint. Train first, or correct the folder.",
    "checkpoint.no_metric": "No checkpoint in {field} has a value of {value}. Choose another metric, or average the "
    "last checkpoints.",
    "checkpoint.damaged": "The checkpoint {field} is damaged: {faults}. Restore its files, or delete it "
    "and average the others.",
    "checkpoint.damaged_file": "{field} is damaged ({reason}). Restore it from a copy, or delete this checkpoint.",
    "checkpoint.deleted": "A run that is still training deleted {field} while it was read. Run the command again.",
    "average.no_checkpoint": "There is no checkpoint to average. Pass at least one.",
    "average.different_parameters": "{field} and {other} differ in {names}. Average checkpoints of one run.",
    "average.different_shapes": "{field} has different shapes in the checkpoints. Average checkpoints of one run.",
    # resuming
    "resume.fewer_steps": "{field}={value} is less than the {steps} steps of {checkpoint}. Set it to {steps} or more, "
    "or start again with --overwrite or in another folder.",
    "resume.baseline": "{checkpoint} belongs to a baseline, but {field} is not set. Set it as before, or start again "
    "with --overwrite or in another folder.",
    "resume.other_recipe": "These fields must not change since {checkpoint}: {changes}. Resume with the old values "
    "({recipe}), or start again with --overwrite or in another folder.",
    "resume.other_training_data": "The training data differs from that of {checkpoint} ({old} sentence pairs before, "
    "{new} now). Restore the old data and settings ({recipe}), or start again with --overwrite or in another folder.",
    "resume.other_validation_data": "The validation data changed ({old} sentence pairs before, {new} now), but this "
    "run compares evaluations. Restore it, or set average.which: last and remove early_stopping_patience.",
    "resume.other_batches": "{field}={value} changes the batches per update of {checkpoint} ({change}); the product "
    "must stay {batches}. {remedy}.",
    "resume.no_optimizer": "{field} has no optimizer state (training.save_only_model), so training cannot be resumed "
    "from it. Set model.init_from to it in a run with another folder, or start again with --overwrite.",
    "resume.other_model": "The model of {field} differs from that of the recipe: {changes}. Resume with the old "
    "recipe, or start again with --overwrite or in another folder.",
    # evidence
    "evidence.damaged": "{field} is not valid evidence of a model ({reason}). Delete it, or copy it again.",
    "test.set": "{field} {value} is incomplete. Pass a name, a file of sources and at least one file of references.",
    "test.not_tested": "{field} has no translations of {name}, only of {known}. Test it under this name first.",
    "test.other_sentences": "{field} was tested on other sentences under the name {name}. Test it on the same files.",
    "test.missing_translations": "{field} is missing. Test {model} again.",
    # -- experiments ---------------------------------------------------------------------------------------------------
    "results.no_runs": "{field} has no folder ROW-SEED with evidence. Copy evidence.json and translations/ of each "
    "model into such a folder.",
    "results.folder": "{field} must be named after a row of {rows} and a seed, such as {example}. Rename it.",
    "results.missing": "{field} does not exist. Copy it from the model's folder.",
    "results.incomplete": "{field} has no {value}. Copy the evidence of a finished, tested model of recnmt train.",
    "results.differs": "{field}: {name} is {value}, but {expected} in {other}. Compare only runs of one budget, with "
    "the same test sets, signatures and decoding.",
    "results.damaged": "{field} cannot be read ({reason}). Delete it and measure again.",
    "results.score": "{field} has BLEU {value} on {name}, but its translations have {score}. Copy both from one model.",
    "results.references": "{field} does not have the references of {name}, whose checksum is in the evidence. "
    "Correct the path.",
    "results.tokenizers": "{field} has {value} symbols, but the models have {expected}. Pass the tokenizers of one of "
    "them.",
    "results.claim": "{field}: {value} or its baseline is not a row of the comparison, or the papers' tables of its "
    "family have no BLEU for this system. Correct the row, its family or its system.",
    "results.section": "{field}: there is no section {value}. Choose one of {sections}.",
    # -- analysis ------------------------------------------------------------------------------------------------------
    "inspect.blank": "The {field} is blank. Pass at least one word.",
    "inspect.no_index": "{field}={value} does not exist. Choose one of {count}, counted from 0.",
    "inspect.no_direction": "{field}={value} does not exist in this model. Choose {names}.",
    "inspect.no_global_state": "The {value} model has no capsules and no gate of a global state. Use a gret with "
    "use_global_state=true and global_capsule or global_gate.",
    "inspect.no_recurrent_positions": "The {value} model has no recurrent positional embeddings. Use an "
    "rpe_transformer with rpe_encoder or rpe_decoder, an rpe_type, and rpe_dim above 0.",
    "inspect.no_relations": "This {value} model has no relation layers (relation_layers=0). Pass an RNMT.",
    "inspect.no_attentive_recurrence": "The {value} model (recurrence_encoder_type={kind}) has no attentive "
    'recurrence. Use a biarn_transformer with recurrence_encoder_type "biarn" or "arn".',
    "plot.too_large": "The picture {field} would be too large. Pass a shorter sentence, or omit the picture.",
    "inspect.too_long": "The sentence has {length} tokens; a tree can have at most {limit}. Pass a shorter sentence.",
    "inspect.no_onlstm": 'The {value} model has no ON-LSTM layers. Use one with "onlstm" in encoder_layer_types.',
    "inspect.nothing": "{value} models have nothing to inspect. Use a model of one of these families: {families}.",
    "curve.missing": "{field} has no complete checkpoint or model with a log. Pass the folder of a training run.",
    "plot.ending": "{field} is not the name of an image file. Use one of the extensions {endings}.",
    # -- hub -----------------------------------------------------------------------------------------------------------
    "card.template": "The card template {field} failed ({reason}). Correct it; the default template is {default}.",
    "card.link": "{field} is a symbolic link, which is not overwritten. Delete the link.",
    "model.own_code": "{field} has the class {value}, and cards and uploads support only those of this package and of "
    "transformers. Write README.md yourself, and upload the folder with huggingface_hub.",
    "card.code": "The code of the card fails ({reason}). Pass a complete model with its tokenizers.",
    "model.adapter": "{field} contains an adapter. Merge it (merge_and_unload) and save, or push it with peft.",
    "weights.pickled": "Loading {field} may run code, because it is pickled. If you trust it, load it with "
    "MarianMTModel.from_pretrained and save it again as safetensors.",
    "marian.parameters": "This is not a standard MarianMT model: unknown parameters {unknown}; missing {missing}.",
    "marian.damaged": "{field} is not an intact model of Marian ({reason}). Copy it again.",
    "marian.no_settings": "{field} has no settings (special:model.yml), so it is not a model of Marian. Pass "
    "model.npz, not the state of the optimizer.",
    "marian.item_type": "{field}: the array {name} has the type {value}, which is not supported or depends on the "
    "processor. Pass the .npz file, or convert that with marian-conv --gemm-type float32 or intgemm8.",
    "marian.unknown_setting": "{path} has the setting {field}={value}, which is unknown. Only Transformers are "
    "supported.",
    "marian.setting": "{path} has the setting {field}={value}, which is not supported; it must be {allowed}.",
    "marian.arrays": "{field} does not have the arrays of its settings: unknown arrays {unknown}; missing {missing}. "
    "Pass the model as Marian saved it; other architectures are not supported.",
    "marian.shape": "{field}: the array {name} has the shape {value}; by the settings it must be {needed}. "
    "Pass the model as Marian saved it.",
    "marian.vocabulary": "{field} is not a SentencePiece model with an end token and an unknown token. Pass the .spm "
    "file of the model.",
    "marian.vocabulary_size": "{field} has {value} symbols, but the embedding of {path} has {rows}. Pass the .spm file "
    "of the model.",
    "marian.one_vocabulary": "{field} differs from {other}, but the model has one vocabulary for both sides. Pass the "
    "same file twice.",
    "marian.controls": "The end and unknown tokens of {field} and {other} must have the same names, and {padding} must "
    "not be a symbol. Pass the .spm files of the model.",
    "marian.tokenizer": "Marian does not support the {field}, a {kind}. Export a model with SentencePiece files, such "
    "as an imported one.",
    "marian.symbols": "The {field} has other ids than its SentencePiece model, so Marian cannot use it. Export a model "
    "that was imported from Marian's own files.",
    "marian.start": "Marian starts from a zero vector, but {field}={value} has an embedding or is a symbol of the "
    "vocabulary. Export a model that was imported from Marian's own files, or fine-tuned from one with "
    "training.label_smoothing_factor=0.",
    "export.family": "{engine} does not support {family}. Export an nmt_transformer, or run this model with `recnmt "
    "translate`, e.g. with --quantization int8.",
    "export.config": "{engine} does not support {field}={value}. Use `recnmt translate`, or train a model without it.",
    "export.npz": "{field} does not end in .npz. Name a .npz file; marian-conv converts it to .bin.",
    "export.symbols": "Two rows of the embedding have the same name. Rename the tokenizer's symbol <row N>.",
    "export.foreign": "{field} is a {family}, which is not a model of recnmt_hf. Import a MarianMT model with "
    "`recnmt convert` (without --to), or export it with Optimum.",
    "export.torch": "torch {value} unrolls recurrences in exported graphs. Upgrade torch, e.g. to 2.13.",
    "export.onnx": "torch cannot export the {field} ({reason}). Use another release of torch and onnxscript, or run "
    "the model with `recnmt translate --quantization int8`.",
    "export.logits": "The logits of the graphs differ from the model's by {distance}; nothing was written. Use another "
    "release of torch, onnxscript and onnxruntime.",
    "publish.translations": "{field} of evidence.json is not a file of translations. Test the model again.",
    "publish.link": "{field} is a symbolic link, which is not published. Replace it with the file.",
    "publish.file": "{field} is not a file that a repository may contain. Remove it from the folder.",
    "publish.arguments": "Pass a model and the name of its repository, as in recnmt publish MODEL USER/NAME, not "
    "{field}. For several models use --space USER/NAME.",
    "publish.other_space": "The Space {field} has files that recnmt publish did not write. Choose another name, or "
    "delete the Space first.",
    "publish.no_such_model": "{field} is neither a folder nor a model of the Hub that the token can read ({reason}). "
    "Correct the name, or log in (`hf auth login`).",
    "publish.no_safetensors": "{field} has no config.json or no weights as safetensors, which the page requires. "
    "Import the model (recnmt convert) or save it with save_pretrained, and pass that folder.",
    "publish.same_name": "{field}: another model has the name {value} too. Rename the folder of one of them.",
    "publish.token": "{field} seems to contain an access token of the Hub. Remove it, and if others may know it, "
    "revoke it at huggingface.co/settings/tokens.",
    "hub.name": "{field} is not a valid repository name. Write user/name with letters, digits, -, _ and .",
    "hub.offline": "HF_HUB_OFFLINE is set. Unset it, or only write the folder (--dry-run).",
    "hub.no_token": "There is no access token of the Hub. Log in (`hf auth login`), or set HF_TOKEN.",
    "hub.not_found": "The token cannot write to {field} ({reason}). Correct the name or the token's permissions.",
    "hub.refused": "The Hub rejected the upload to {field} ({reason}). {remedy}.",
    "hub.connection": "The upload to {field} failed: {endpoint} cannot be reached ({reason}). Check the connection and "
    "try again; uploaded files are not sent again.",
    "hub.card": "The Hub rejected the card ({reason}). Correct it. Licences are identifiers such as apache-2.0, "
    "cc-by-4.0 or other. Nothing was uploaded.",
    # -- commands ------------------------------------------------------------------------------------------------------
    "usage.inputs": "Pass {inputs}.",
    "usage.requires": "{field} requires {other}. Add {other}.",
    "usage.excludes": "{field} and {other} cannot be combined. Remove one of them.",
    "usage.duplicate": "{field}: {value} repeats {first}. Give each value once.",
    "usage.setting": "{field}: {value} is not a setting. Write name=value, such as no_repeat_ngram_size=3.",
    "usage.empty_file": "{field} is empty. Pass a file with at least one {content}.",
    "links.lines": "{field} has {lines} lines for {pairs} pairs. Pass the gold file of these pairs.",
    "links.beyond": "{field} has a link beyond {source} source and {target} target words. Pass the gold file of these "
    "sentences, source first; use --one-based if positions count from 1.",
    "average.no_folder": "The folder {value} does not exist. Pass folders of checkpoints, or of one run.",
    "average.output": "The output {field} is inside {folder}, which is averaged. Choose another folder.",
    "evaluate.lines": "{field} has {lines} lines, but {other} has {others}. Pass line-aligned files of one test set.",
    "export.quantization": "{field}={value} is for CTranslate2 only. Use float32; ONNX graphs are quantized with "
    "onnxruntime.quantization.quantize_dynamic.",
    "inspect.no_effect": "{field} has no effect on the subject {subject}. Remove it, or choose another --subject.",
    "records.line": "{field} is not an object with {keys} ({reason}). Pass `recnmt translate --format jsonl` output.",
    "records.split": "{field} has the tokens of several sentences, which have no joint probability. Translate with "
    "--split-sentences never and without --on-long split.",
    "benchmark.beams": "{field} needs a model of {value} in float32 with two beam sizes. Add a --system, and float32 "
    "to --types.",
    "benchmark.family": "{field} does not support {value}. Use one of {families}.",
    "benchmark.folder": "{field} has no {file}. Pass src/recnmt_hf/models of another version.",
    "benchmark.no_sentences": "{field} has no sentence to translate. Use another file or another --source-tokens.",
    "benchmark.weights": "{field} has a {family} with other weights ({reason}). Choose another version.",
    "output.closed": "Standard output is closed, so results would be lost. Leave it open, or redirect it to a file.",
    "system.memory": "{reason}. Use smaller batches (--max-tokens), fewer beams, or a smaller data type.",
    "system.open_files": "{reason}. Raise the limit (`ulimit -n`), or close programs with many open files.",
    "system.space": "{field} cannot be written ({reason}). Free some space, or choose another place.",
    "system.file": "{field}: {reason}. Correct the path, or the type and permissions of the file.",
    "average.count": "{field}={value} exceeds the {most} complete checkpoints in {place}. Lower {field}.",
}
