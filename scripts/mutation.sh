#!/usr/bin/env bash
# Mutation testing of one module: changes it in many small ways, one at a time, and prints the changes that no test
# notices. Each of them is a missing test, or code that makes no difference.
#
#   bash scripts/mutation.sh data/batching.py                       # with the tests of the table below
#   bash scripts/mutation.sh training/trainer.py tests/training/test_training.py tests/training/test_resuming.py
#
# A large module has many hundreds of changes. MUTATION_SAMPLE=N tries N of them, spread evenly over the module;
# MUTATION_ONLY="x_squash__mutmut_3 x_route__mutmut_5" tries those of the given names, as when a test has been added for
# what was printed.
#
# Tests that are marked slow are left out. The changes are made in a copy, which is deleted at the end
# (MUTATION_FOLDER=/path keeps it there). Functions with decorators other than classmethod and staticmethod, and the
# wording of raised errors, are left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

# Module, and the tests that are to notice its changes; a module may have several rows. A module that is not named: the
# test file of its own name; one of models/ without one: all tests of models. The tests of the toys notice nothing: they
# run copies of the models' files.
table="
data/files.py                             tests/data/test_files.py tests/data/test_text.py
inference/backends/ctranslate2_model.py   tests/hub/test_engines.py
inference/backends/ensemble.py            tests/inference/test_ensemble.py
inference/backends/onnx_model.py          tests/hub/test_onnx.py
inference/backends/torch_model.py         tests/inference/test_model_checks.py::test_a_foreign_smaller_tokenizer
inference/backends/torch_model.py         tests/inference/test_model_checks.py::test_whoever_wants_to_may_look_alone
inference/backends/torch_model.py         tests/inference/test_search.py
inference/backends/torch_model.py         tests/inference/test_translator.py::test_finished_sentences_leave_where_each_row_stands_alone
inference/backends/torch_model.py         tests/inference/test_translator.py::test_length_limit_holds_for_each_sentence
inference/backends/torch_model.py         tests/inference/test_translator.py::test_scores_by_one_sentence_at_a_time
inference/backends/torch_model.py         tests/inference/test_translator.py::test_target_tokenizer_of_its_own
inference/backends/torch_model.py         tests/inference/test_translator.py::test_works_for_other_models_of_transformers
inference/batching.py                     tests/inference/test_translator.py::test_batches_hold_similar_lengths_within_their_tokens
inference/batching.py                     tests/inference/test_translator.py::test_batches_of_scores_and_alignments_are_bounded
inference/batching.py                     tests/inference/test_translator.py::test_ids_are_padded_on_the_models_device
inference/devices.py                      tests/inference/test_loading.py
inference/loading.py                      tests/inference/test_loading.py
inference/loading.py                      tests/inference/test_model_checks.py::test_no_report_that_can_be_ignored
inference/loading.py                      tests/inference/test_model_checks.py::test_wrong_weights_are_refused[misshapen]
inference/loading.py                      tests/inference/test_translator.py::test_exported_folders_are_taken_by_their_engine
inference/loading.py                      tests/inference/test_translator.py::test_files_are_loaded_as_asked
inference/loading.py                      tests/inference/test_translator.py::test_pickled_weights_are_not_read
inference/model_checks.py                 tests/inference/test_model_checks.py::test_computed_tables_and_forbidden_tokens_are_no_fault
inference/model_checks.py                 tests/inference/test_model_checks.py::test_every_data_type_is_looked_at
inference/model_checks.py                 tests/inference/test_model_checks.py::test_every_fault_of_the_files_is_named
inference/model_checks.py                 tests/inference/test_model_checks.py::test_parameters_without_values
inference/model_checks.py                 tests/inference/test_model_checks.py::test_the_first_of_many_names_are_given
inference/model_checks.py                 tests/inference/test_model_checks.py::test_weights_that_wait_elsewhere_are_not_missing
inference/model_settings.py               tests/inference/test_translator.py::test_only_tables_of_positions_limit_a_sentence
inference/model_settings.py               tests/inference/test_translator.py::test_scoring_starts_as_generation_does
inference/model_task.py                   tests/inference/test_sentences.py
inference/options.py                      tests/inference/test_decoding.py
inference/options.py                      tests/inference/test_options.py::test_a_complaint_of_transformers_is_cut_to_its_reason
inference/options.py                      tests/inference/test_options.py::test_contradictions
inference/options.py                      tests/inference/test_options.py::test_names_of_transformers_stand_for_options
inference/options.py                      tests/inference/test_options.py::test_settings_of_generate_that_cannot_be
inference/options.py                      tests/inference/test_options.py::test_wrong_names_and_contradictions_are_named
inference/pipeline.py                     tests/inference/test_model_checks.py::test_wrong_weights_are_refused[misshapen]
inference/pipeline.py                     tests/inference/test_model_checks.py::test_wrong_weights_are_refused[missing]
inference/pipeline.py                     tests/inference/test_pipeline.py::test_calls_go_through_the_methods
inference/pipeline.py                     tests/inference/test_pipeline.py::test_every_way_to_give_sentences
inference/pipeline.py                     tests/inference/test_pipeline.py::test_long_sentences_are_split_or_cut_off
inference/pipeline.py                     tests/inference/test_pipeline.py::test_model_and_tokenizer_by_position
inference/pipeline.py                     tests/inference/test_pipeline.py::test_names_of_transformers
inference/pipeline.py                     tests/inference/test_pipeline.py::test_prefixes
inference/pipeline.py                     tests/inference/test_pipeline.py::test_settings_of_a_call_join_those_of_the_pipeline
inference/pipeline.py                     tests/inference/test_pipeline.py::test_the_target_tokenizer_is_of_the_models_own_revision
inference/pipeline.py                     tests/inference/test_pipeline.py::test_the_task_is_registered_with_its_classes
inference/pipeline.py                     tests/inference/test_pipeline.py::test_unknown_tokens_are_reported
inference/pipeline.py                     tests/inference/test_pipeline.py::test_what_is_wrong_is_named
inference/pipeline.py                     tests/inference/test_translator.py::test_target_tokenizer_of_its_own
inference/seeded_draws.py                 tests/inference/test_options.py
inference/translation_warnings.py         tests/inference/test_sentences.py
inference/translation_warnings.py         tests/inference/test_translator.py::test_unknown_tokens_are_counted
inference/translator.py                   tests/inference/test_model_checks.py::test_whoever_wants_to_may_look_alone
inference/translator.py                   tests/inference/test_options.py::test_a_prefix_of_a_split_sentence_begins_its_first_part
inference/translator.py                   tests/inference/test_options.py::test_prefixes_that_cannot_be
inference/translator.py                   tests/inference/test_options.py::test_samples_follow_their_seed
inference/translator.py                   tests/inference/test_options.py::test_samples_of_one_seed_differ_from_buffer_to_buffer
inference/translator.py                   tests/inference/test_options.py::test_what_is_no_list_of_sentences_or_prefixes_is_named
inference/translator.py                   tests/inference/test_translator.py::test_a_row_ends_with_its_end_token_or_before_its_padding
inference/translator.py                   tests/inference/test_translator.py::test_a_source_of_which_the_tokenizer_leaves_nothing
inference/translator.py                   tests/inference/test_translator.py::test_alignments_point_into_the_source
inference/translator.py                   tests/inference/test_translator.py::test_empty_gives_empty
inference/translator.py                   tests/inference/test_translator.py::test_hypotheses_know_whether_they_ended
inference/translator.py                   tests/inference/test_translator.py::test_length_limit_holds_for_each_sentence
inference/translator.py                   tests/inference/test_translator.py::test_limits_of_lengths
inference/translator.py                   tests/inference/test_translator.py::test_long_sentences_are_refused_or_split
inference/translator.py                   tests/inference/test_translator.py::test_messages_name_the_place_of_a_pair
inference/translator.py                   tests/inference/test_translator.py::test_one_text_may_have_one_prefix
inference/translator.py                   tests/inference/test_translator.py::test_parts_are_joined_as_the_target_is_written
inference/translator.py                   tests/inference/test_translator.py::test_prefixes_of_several_split_sentences
inference/translator.py                   tests/inference/test_translator.py::test_scores_are_left_out_on_request
inference/translator.py                   tests/inference/test_translator.py::test_scores_equal_translations
inference/translator.py                   tests/inference/test_translator.py::test_scores_equal_translations[1]
inference/translator.py                   tests/inference/test_translator.py::test_scores_follow_their_options
inference/translator.py                   tests/inference/test_translator.py::test_what_cannot_be_scored_is_named
inference/translator.py                   tests/inference/test_translator.py::test_what_is_no_sentence_is_named
inference/translator.py                   tests/inference/test_translator.py::test_what_is_too_long_may_be_cut_off
inference/translator.py                   tests/inference/test_translator.py::test_what_shows_nothing_translates_to_nothing
inference/translator.py                   tests/metrics/test_alignment.py
metrics/bleu.py                           tests/metrics/test_bleu.py
metrics/rouge.py                          tests/metrics/test_rouge.py
metrics/significance.py                   tests/metrics/test_significance.py tests/metrics/test_bleu.py
models/absorbing_attention.py             tests/models/test_biarn_transformer.py::test_absorbed_attention_has_dropout_in_training_only
models/absorbing_attention.py             tests/models/test_biarn_transformer.py::test_absorbed_projections_equal_plain_ones
models/absorbing_attention.py             tests/models/test_biarn_transformer.py::test_generation_with_absorbed_projections
models/absorbing_attention.py             tests/models/test_biarn_transformer.py::test_memories_are_absorbed_where_that_is_less_work
models/absorbing_attention.py             tests/models/test_biarn_transformer.py::test_memories_that_are_kept_serve_any_number_of_queries
models/absorbing_attention.py             tests/models/test_biarn_transformer.py::test_wrapped_projections_are_not_absorbed
models/additive_attention.py              tests/models/test_rnmt.py::test_additive_attention_keeps_the_type_of_the_annotations
models/additive_attention.py              tests/models/test_rnmt.py::test_equations
models/attention.py                       tests/models/test_attention.py
models/attention.py                       tests/models/test_fast_paths.py::test_attention_by_plain_matmuls
models/attentional_steps.py               tests/models/test_rnmt.py::test_fast_paths_equal_plain_ones
models/attentional_steps.py               tests/models/test_rnmt.py::test_frozen_parameters_get_no_gradient_and_change_no_other
models/attentional_steps.py               tests/models/test_rnmt.py::test_gradients_do_not_depend_on_where_autocast_ends
models/attentional_steps.py               tests/models/test_rnmt.py::test_half_precision_weights
models/attentional_steps.py               tests/models/test_rnmt.py::test_steps_pass_gradcheck
models/attentive_steps.py                 tests/models/test_biarn_transformer.py::TestBiARNTransformer::test_bfloat16_trains
models/attentive_steps.py                 tests/models/test_biarn_transformer.py::test_dropout_stands_where_the_equations_have_it
models/attentive_steps.py                 tests/models/test_biarn_transformer.py::test_fast_steps_equal_reference
models/attentive_steps.py                 tests/models/test_biarn_transformer.py::test_shapes_without_data
models/attentive_steps.py                 tests/models/test_biarn_transformer.py::test_steps_are_not_differentiated_twice
models/attentive_steps.py                 tests/models/test_biarn_transformer.py::test_words_are_read_without_projection_where_that_is_less_work
models/capsule_routing.py                 tests/models/test_gret.py::test_equations
models/capsule_routing.py                 tests/models/test_gret.py::test_routing_counts_in_float32
models/capsule_routing.py                 tests/models/test_gret.py::test_routing_without_votes_equals_routing
models/capsule_routing.py                 tests/models/test_gret.py::test_squash_of_zero
models/capsule_routing.py                 tests/models/test_gret.py::test_votes_are_saved_where_that_multiplies_less
models/configuration_biarn_transformer.py tests/models/test_biarn_transformer.py::test_wrong_values_are_refused_with_the_remedy
models/configuration_biarn_transformer.py tests/models/test_configurations.py
models/configuration_gret.py              tests/models/test_configurations.py
models/configuration_gret.py              tests/models/test_gret.py::test_parameters_added_at_base_size
models/configuration_nmt_transformer.py   tests/models/test_configurations.py
models/configuration_onlstm_transformer.py tests/models/test_configurations.py
models/configuration_onlstm_transformer.py tests/models/test_onlstm_transformer.py::test_presets_of_every_size
models/configuration_onlstm_transformer.py tests/models/test_onlstm_transformer.py::test_sizes_of_the_papers_encoders
models/configuration_onlstm_transformer.py tests/models/test_onlstm_transformer.py::test_wrong_fields
models/configuration_rnmt.py              tests/models/test_configurations.py
models/configuration_rnmt.py              tests/models/test_rnmt.py::test_every_row_of_the_tables_is_a_config
models/configuration_rnmt.py              tests/models/test_rnmt.py::test_what_is_not_said_follows_from_what_is
models/configuration_rpe_transformer.py   tests/models/test_configurations.py
models/configuration_rpe_transformer.py   tests/models/test_rpe_transformer.py::test_parameters_added
models/configuration_rpe_transformer.py   tests/models/test_rpe_transformer.py::test_usual_shares_of_the_channels
models/configuration_rpe_transformer.py   tests/models/test_rpe_transformer.py::test_wrong_fields
models/configuration_seq2seq.py           tests/models/test_configurations.py
models/configuration_seq2seq.py           tests/models/test_nmt_transformer.py::test_unknown_preset
models/configuration_transformer.py       tests/models/test_configurations.py
models/fast_paths.py                      tests/models/test_fast_paths.py::test_a_path_is_taken_where_it_wins_clearly
models/fast_paths.py                      tests/models/test_fast_paths.py::test_an_output_layer_is_measured_for_itself
models/fast_paths.py                      tests/models/test_fast_paths.py::test_attention_by_plain_matmuls
models/fast_paths.py                      tests/models/test_fast_paths.py::test_choice_of_plain_matmuls
models/fast_paths.py                      tests/models/test_fast_paths.py::test_dropout_follows_the_seed
models/fast_paths.py                      tests/models/test_fast_paths.py::test_dropout_has_its_rate_and_scale
models/fast_paths.py                      tests/models/test_fast_paths.py::test_few_elements_are_dropped_by_torch
models/fast_paths.py                      tests/models/test_fast_paths.py::test_measuring_leaves_random_numbers_alone
models/fast_paths.py                      tests/models/test_fast_paths.py::test_projection_calls_what_is_not_a_plain_linear
models/fast_paths.py                      tests/models/test_fast_paths.py::test_projection_of_few_rows
models/fast_paths.py                      tests/models/test_fast_paths.py::test_the_switch
models/fast_paths.py                      tests/models/test_fast_paths.py::test_the_winning_matmul_is_taken
models/fast_paths.py                      tests/models/test_fast_paths.py::test_training_and_small_models_measure_nothing
models/fast_paths.py                      tests/models/test_fast_paths.py::test_values_of_the_setting_measure_nothing
models/initialization.py                  tests/models/test_recurrent_ground.py
models/initialization.py                  tests/models/test_rnmt.py::test_initialisation_of_the_paper
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::TestBiARNTransformer::test_memories_are_projected_once_per_source
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::test_adapters_and_hooks_are_called
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::test_dropout_stands_where_the_equations_have_it
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::test_equations
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::test_evidence
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::test_fast_steps_equal_reference
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::test_masks_of_another_shape_are_refused
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::test_memory_dropout_leaves_the_recurrence_out_for_whole_sentences
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::test_shapes_without_data
models/modeling_biarn_transformer.py      tests/models/test_biarn_transformer.py::test_step_attentions_are_those_of_the_equations
models/modeling_gret.py                   tests/models/test_gret.py::test_an_encoder_output_without_the_vector_is_refused
models/modeling_gret.py                   tests/models/test_gret.py::test_bare_model_is_gated_too
models/modeling_gret.py                   tests/models/test_gret.py::test_dropout_stands_where_the_equations_have_it
models/modeling_gret.py                   tests/models/test_gret.py::test_equations
models/modeling_gret.py                   tests/models/test_gret.py::test_parameters_added_at_base_size
models/modeling_nmt_transformer.py        tests/models/test_nmt_transformer.py::TestNMTTransformer::test_every_cache_gives_the_same_logits[default-1-greedy]
models/modeling_nmt_transformer.py        tests/models/test_nmt_transformer.py::TestNMTTransformer::test_ragged_batch_equals_single_sentences
models/modeling_nmt_transformer.py        tests/models/test_nmt_transformer.py::test_attention_kernels_that_do_not_fit_are_refused
models/modeling_nmt_transformer.py        tests/models/test_nmt_transformer.py::test_directional_mask_of_a_head_without_keys_gives_zero
models/modeling_nmt_transformer.py        tests/models/test_nmt_transformer.py::test_dropout_stands_where_the_equations_have_it
models/modeling_nmt_transformer.py        tests/models/test_nmt_transformer.py::test_equations
models/modeling_nmt_transformer.py        tests/models/test_nmt_transformer.py::test_tables_of_a_models_relative_positions
models/modeling_onlstm_transformer.py     tests/models/test_onlstm_transformer.py::test_cumulative_sums_are_float32_whatever_the_type_outside
models/modeling_onlstm_transformer.py     tests/models/test_onlstm_transformer.py::test_dropout_stands_where_the_equations_have_it
models/modeling_onlstm_transformer.py     tests/models/test_onlstm_transformer.py::test_equations
models/modeling_onlstm_transformer.py     tests/models/test_onlstm_transformer.py::test_masks_of_another_shape_are_refused
models/modeling_onlstm_transformer.py     tests/models/test_onlstm_transformer.py::test_recurrent_weights_start_orthogonal_gate_by_gate
models/modeling_onlstm_transformer.py     tests/models/test_onlstm_transformer.py::test_what_padding_holds_changes_nothing
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_a_saved_state_loads_strictly
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_batch_norm_in_training_sees_real_tokens_only
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_batch_norm_of_half_precision_is_computed_in_float32
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_caches_without_a_place_for_the_state_are_refused
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_dropout_stands_behind_inputs_layers_and_readout
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_equations
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_fast_paths_equal_plain_ones
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_hidden_states_are_what_they_are_called
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_modules_with_hooks_are_called
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_norms_are_saved
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_padding_of_a_target_leaves_the_state
models/modeling_rnmt.py                   tests/models/test_rnmt.py::test_relation_scores_are_lengths_of_relations
models/modeling_rpe_transformer.py        tests/models/test_rpe_transformer.py::test_dropout_stands_where_the_equations_have_it
models/modeling_rpe_transformer.py        tests/models/test_rpe_transformer.py::test_equations
models/modeling_rpe_transformer.py        tests/models/test_rpe_transformer.py::test_masks_of_another_shape_are_refused
models/modeling_rpe_transformer.py        tests/models/test_rpe_transformer.py::test_parameters_added
models/modeling_rpe_transformer.py        tests/models/test_rpe_transformer.py::test_sliced_projections_start_as_dense_ones_of_their_size
models/multi_column.py                    tests/models/test_biarn_transformer.py::test_dropout_stands_where_the_equations_have_it
models/multi_column.py                    tests/models/test_biarn_transformer.py::test_equations
models/ordered_neurons.py                 tests/models/test_onlstm_transformer.py::test_fast_steps_equal_the_reference
models/ordered_neurons.py                 tests/models/test_onlstm_transformer.py::test_master_gates_are_monotone
models/ordered_neurons.py                 tests/models/test_onlstm_transformer.py::test_steps_pass_gradcheck
models/ordered_neurons.py                 tests/models/test_onlstm_transformer.py::test_the_last_chunk_is_never_written
models/position_embeddings.py             tests/models/test_nmt_transformer.py::test_learned_positions_start_as_other_embeddings
models/position_embeddings.py             tests/models/test_nmt_transformer.py::test_positions_from_an_offset_by_number_or_by_ids
models/position_embeddings.py             tests/models/test_nmt_transformer.py::test_sequences_beyond_the_position_table_are_refused
models/recurrent_cache.py                 tests/models/test_recurrent_ground.py
models/recurrent_layers.py                tests/models/test_biarn_transformer.py::test_dropout_stands_where_the_equations_have_it
models/recurrent_layers.py                tests/models/test_biarn_transformer.py::test_equations
models/recurrent_layers.py                tests/models/test_recurrent_ground.py
models/relation_pairs.py                  tests/models/test_rnmt.py::test_equations
models/relation_pairs.py                  tests/models/test_rnmt.py::test_gradients_of_many_tiles_are_summed_in_float32
models/relation_pairs.py                  tests/models/test_rnmt.py::test_nothing_of_all_pairs_or_all_steps_is_made_at_once
models/relation_pairs.py                  tests/models/test_rnmt.py::test_pairs_are_kept_for_the_backward_pass_up_to_a_limit
models/relation_pairs.py                  tests/models/test_rnmt.py::test_pairs_pass_gradcheck_in_any_tiles
models/relation_pairs.py                  tests/models/test_rnmt.py::test_pairs_without_a_mask_are_those_of_real_tokens_alone
models/relation_pairs.py                  tests/models/test_rnmt.py::test_tiles_cover_each_pair_once_and_stay_small
models/relative_attention.py              tests/models/test_nmt_transformer.py::test_equations
models/relative_attention.py              tests/models/test_nmt_transformer.py::test_tables_of_relative_positions
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::TestNMTTransformer::test_attentions_come_on_request
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::TestNMTTransformer::test_beams_of_a_batch_equal_beams_of_single_sentences
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::TestNMTTransformer::test_embeddings_replace_ids
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::TestNMTTransformer::test_encoder_outputs_may_be_given_in_any_form
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::TestNMTTransformer::test_padded_prompts_give_the_same_logits_with_every_cache[default-3]
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::TestNMTTransformer::test_tied_embeddings
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::test_labels_are_shifted_only_where_the_special_tokens_are_known
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::test_losses_agree_with_a_bias_of_the_logits_and_a_given_divisor
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::test_new_rows_follow_the_arguments_of_resizing
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::test_padding_starts_at_zero_and_is_not_trained
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::test_predictions_of_the_trainer_are_the_logits
models/seq2seq_base.py                    tests/models/test_nmt_transformer.py::test_the_bias_of_the_logits_is_resized
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::TestNMTTransformer::test_a_missing_embedding_is_reported_and_initialised
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::TestNMTTransformer::test_a_subclass_is_saved_with_code_that_loads
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::TestNMTTransformer::test_an_output_matrix_that_came_apart_is_saved
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::TestNMTTransformer::test_loading_initialises_nothing_anew
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::TestNMTTransformer::test_tied_embeddings[default-tied-separate]
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::test_a_checkpoint_may_hold_a_shared_matrix_under_any_of_its_names
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::test_a_saved_folder_keeps_the_code_that_its_configuration_names
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::test_a_warm_start_reports_what_it_did
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::test_classes_that_are_sharded_whole_are_those_that_a_model_has
models/seq2seq_loading.py                 tests/models/test_nmt_transformer.py::test_new_rows_follow_the_arguments_of_resizing
models/seq2seq_loading.py                 tests/models/test_rnmt.py::test_initialisation_of_the_paper
models/seq2seq_loss.py                    tests/models/test_fast_paths.py
models/seq2seq_outputs.py                 tests/models/test_recurrent_ground.py
models/seq2seq_stacks.py                  tests/models/test_attention.py::test_arguments_of_a_users_own_kernel_reach_every_attention
models/seq2seq_stacks.py                  tests/models/test_nmt_transformer.py::TestNMTTransformer::test_embeddings_replace_ids
models/seq2seq_stacks.py                  tests/models/test_nmt_transformer.py::TestNMTTransformer::test_ids_out_of_range_are_named
models/seq2seq_stacks.py                  tests/models/test_nmt_transformer.py::TestNMTTransformer::test_padding_changes_nothing
models/seq2seq_stacks.py                  tests/models/test_nmt_transformer.py::TestNMTTransformer::test_steps_equal_teacher_forcing
models/seq2seq_stacks.py                  tests/models/test_nmt_transformer.py::test_dropout_stands_where_the_equations_have_it
models/seq2seq_stacks.py                  tests/models/test_nmt_transformer.py::test_equations
models/seq2seq_stacks.py                  tests/models/test_nmt_transformer.py::test_hidden_states_may_be_chosen_by_their_places
models/seq2seq_stacks.py                  tests/models/test_nmt_transformer.py::test_memory_is_traded_for_time_on_request_only
models/seq2seq_stacks.py                  tests/models/test_rnmt.py::test_hidden_states_are_what_they_are_called
models/simple_recurrent_unit.py           tests/models/test_rpe_transformer.py::test_equations
models/source_memory.py                   tests/models/test_recurrent_ground.py
models/step_matmuls.py                    tests/models/test_biarn_transformer.py::test_fast_steps_equal_reference
models/step_matmuls.py                    tests/models/test_fast_paths.py::test_matmuls_of_a_step_have_the_precision_of_autocast
models/step_matmuls.py                    tests/models/test_rnmt.py::test_fast_paths_equal_plain_ones
models/transformer_layers.py              tests/models/test_attention.py::test_arguments_of_a_users_own_kernel_reach_every_attention
models/transformer_layers.py              tests/models/test_biarn_transformer.py::test_dropout_stands_where_the_equations_have_it
models/transformer_layers.py              tests/models/test_nmt_transformer.py::TestNMTTransformer::test_padding_changes_nothing
models/transformer_layers.py              tests/models/test_nmt_transformer.py::test_dropout_stands_where_the_equations_have_it
models/transformer_layers.py              tests/models/test_nmt_transformer.py::test_equations
models/transformer_stacks.py              tests/models/test_gret.py::test_equations
models/transformer_stacks.py              tests/models/test_nmt_transformer.py::TestNMTTransformer::test_padded_prompts_give_the_same_logits_with_every_cache[default-1]
models/transformer_stacks.py              tests/models/test_nmt_transformer.py::test_equations
training/checkpoints.py                   tests/training/test_checkpoints.py tests/training/test_checkpoint_folders.py
"

if [ $# -eq 0 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 2
fi
module="${1#src/recnmt_hf/}"
shift
if [ ! -f "src/recnmt_hf/$module" ]; then
    echo "There is no src/recnmt_hf/$module. Remedy: name a module as in data/batching.py." >&2
    exit 2
fi
if [ $# -gt 0 ]; then
    tests="$*"
else
    tests="$(awk -v module="$module" '$1 == module { $1 = ""; print }' <<< "$table")"
    name="$(basename "$module" .py)"
    name="${name#modeling_}"
    own="tests/$(dirname "$module")/test_${name#configuration_}.py"
    if [ -z "$tests" ] && [ -f "$own" ]; then
        tests="$own"
    elif [ -z "$tests" ] && [[ "$module" == models/* ]]; then
        tests="tests/models"
    elif [ -z "$tests" ]; then
        echo "Which tests are to notice changes of $module? Remedy: name them after the module." >&2
        exit 2
    fi
fi

source scripts/environment.sh
if ! python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("mutmut") is None)'; then
    python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e ".[mutation]"
fi

folder="${MUTATION_FOLDER:-}"
if [ -z "$folder" ]; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"
cp -r src tests scripts model_cards README.md CHANGELOG.md pyproject.toml "$folder"
cd "$folder"
{
    echo "[mutmut]"
    echo "source_paths = src"
    echo "only_mutate = src/recnmt_hf/$module"
    echo "do_not_mutate_patterns = raise \w+\("
    echo "use_git_change_detection = false"
    printf "also_copy =\n    src\n    scripts\n    model_cards\n    README.md\n    CHANGELOG.md\n"
    # Tests of more than ten seconds would be run for every change of what they reach.
    printf "pytest_add_cli_args =\n    -p\n    no:cacheprovider\n    -m\n    not slow\n"
    printf "pytest_add_cli_args_test_selection =\n"
    printf "    %s\n" $tests
} > setup.cfg

# The changes to be tried, by name.
python - "src/recnmt_hf/$module" > changes.log <<'PYTHON'
import os
import pathlib
import sys

from mutmut.__main__ import get_mutant_name
from mutmut.mutation.file_mutation import mutate_file_contents

path = pathlib.Path(sys.argv[1])
every = mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names
if not every:
    sys.exit(f"There is nothing to change in {path}.")
chosen = os.environ.get("MUTATION_ONLY", "").split() or every
count = min(int(os.environ.get("MUTATION_SAMPLE") or len(chosen)), len(chosen))
if count < 1 or not set(chosen) <= set(every):
    message = "MUTATION_SAMPLE must be at least 1, and MUTATION_ONLY must name changes of this module. Not among them:"
    sys.exit(f"{message} {sorted(set(chosen) - set(every))}.")
for i in range(count):
    print(get_mutant_name(path, chosen[i * len(chosen) // count]))
print(f"{count} of {len(every)} changes", file=sys.stderr)
PYTHON

# Subprocesses of the tests are to see the changed module too.
mkdir -p mutants/src
export PYTHONPATH="$folder/mutants/src" OMP_NUM_THREADS=1
mutmut run --max-children "${RECNMT_TEST_WORKERS:-2}" $(cat changes.log) 2>&1 | tr '\r' '\n' > run.log || {
    tail -n 40 run.log
    exit 1
}
mutmut results --all true | grep -v ": not checked$" > results.log || true
echo
echo "$module with$(printf ' %s' $tests):"
sed 's/.*: //' results.log | sort | uniq -c
# `mutmut show` for each of them, without starting it as many times.
python - <<'PYTHON'
import re

from mutmut.__main__ import find_mutant, get_diff_for_mutant

for line in open("results.log", encoding="utf-8"):
    name, _, outcome = line.strip().rpartition(": ")
    if outcome in ("survived", "no tests", "suspicious"):
        lines = get_diff_for_mutant(name, path=find_mutant(name).path).splitlines()
        changes = [change for change in lines if re.match(r"[-+] |@@", change)]
        print(f"\n# {name.rpartition('.')[2]}: {outcome}", *changes, sep="\n")
PYTHON
