#!/usr/bin/env bash
# Trains and measures what a study in model_cards/studies.md shows: bash scripts/experiments/studies.sh NAME
# Runs in the root of a clone, with the corpora that the recipes name in data/.
set -euo pipefail

biarn_from_scratch() {
    recnmt train scripts/recipes/multi30k_en_de_small.yaml
    recnmt train scripts/recipes/multi30k_en_de_small_biarn.yaml training.baseline_steps=null
    recnmt evaluate outputs/multi30k_en_de_small/model-test_2016_flickr.de \
        outputs/multi30k_en_de_small_biarn/model-test_2016_flickr.de --references test_2016_flickr.de --no-ter
    recnmt train scripts/recipes/multi30k_en_de_small_biarn_warm.yaml --output outputs/two_stages \
        model.init_from=outputs/multi30k_en_de_small/checkpoint-2750 training.max_steps=850 training.eval_steps=170 training.save_steps=170
    recnmt evaluate outputs/multi30k_en_de_small/model-test_2016_flickr.de \
        outputs/two_stages/model-test_2016_flickr.de --references test_2016_flickr.de --no-ter
}

gret_table_3() {
    small="model.preset=tiny model.fields.dropout=0.1 training.bf16=false training.max_tokens=1536"
    recnmt train scripts/recipes/multi30k_en_de_small.yaml $small training.max_steps=2000 training.learning_rate=3e-3 \
        training.warmup_steps=400 training.bleu_samples=200 training.seed=1 average.count=3 --output outputs/base_1
    python scripts/experiments/sweep.py scripts/recipes/multi30k_en_de_small.yaml $small model.type=gret \
        'model.init_from=outputs/base_{seed}/model' \
        training.max_steps=400 training.learning_rate=1.3e-3 training.lr_scheduler_type=linear training.warmup_steps=50 \
        training.eval_steps=200 training.save_steps=200 training.bleu_samples=0 average.count=1 \
        --rows scripts/recipes/rows/gret_table_3.yaml --seeds 1 --output outputs/table_3
    python scripts/experiments/sweep.py scripts/recipes/multi30k_en_de_small.yaml $small model.type=gret \
        model.init_from=outputs/base_1/model \
        training.max_steps=150 training.learning_rate=1.3e-3 training.lr_scheduler_type=linear training.warmup_steps=20 \
        training.eval_steps=150 training.save_steps=150 training.bleu_samples=0 average.count=1 decoding.beams=1 \
        --vary model.fields.num_capsules=8,16,32 --vary model.fields.routing_iterations=1,3 --output outputs/figure_4
}

rpe_table_3() {
    tiny="model.preset=tiny model.fields.dropout=0.1 training.max_tokens=1536 training.learning_rate=3e-3 training.warmup_steps=400"
    tiny="$tiny training.bleu_samples=0 training.bf16=true training.max_steps=1600 training.eval_steps=400 training.save_steps=400"
    python scripts/experiments/sweep.py scripts/recipes/multi30k_en_de_small_rpe.yaml $tiny average.count=3 --seeds 1 \
        --rows scripts/recipes/rows/rpe_table_3.yaml --output outputs/rpe_table_3
    python scripts/experiments/sweep.py scripts/recipes/quickstart_rpe.yaml training.bleu_samples=0 --seeds 1 \
        --plot rpe_channels.svg --vary model.fields.rpe_dim=16,32,48,64 --vary model.fields.rpe_type=rpehead,mprhead
    python scripts/card_tables.py   # draws the picture again from the stored results
}

onlstm_tables() {
    python scripts/experiments/sweep.py scripts/recipes/quickstart_onlstm.yaml training.bleu_samples=0 --seeds 1 \
        --rows scripts/recipes/rows/onlstm_tables_1_2.yaml --size tiny
}

probing() {
    python scripts/experiments/probing.py "outputs/onlstm_rows/hybrid_with_short-cut,seed=1/model" probing_en \
        --output mlp.csv
}

logic() {
    python scripts/experiments/logical_inference.py scripts/recipes/logic/logical_inference.yaml data.folder=logic_bowman2015 \
        --plot logic.svg  # 20 passes
    python scripts/experiments/logical_inference.py scripts/recipes/logic/logical_inference.yaml data.folder=logic_bowman2015 \
        training.epochs=6 -o outputs/logic_6
    python scripts/experiments/logical_inference.py scripts/recipes/logic/logical_inference.yaml data.folder=logic_bowman2015 \
        training.seed=2 models.SAN=null \
        models.LSTM=null -o outputs/logic_seed_2   # repeat with seed 3
    python scripts/card_tables.py   # draws the picture again from the stored results
    dropout="{dropout: 0.2, attention_dropout: 0.1, activation_dropout: 0.1, classifier_dropout: 0.2}"
    python scripts/experiments/logical_inference.py scripts/recipes/logic/logical_inference.yaml data.folder=logic_bowman2015 \
        training.epochs=6 -o outputs/dropout_6 \
        models.SAN.fields="$dropout" models.LSTM.fields="$dropout" models.ON-LSTM.fields="$dropout" models.hybrid.fields="$dropout"
    python scripts/experiments/logical_inference.py scripts/recipes/logic/logical_inference.yaml data.folder=logic_bowman2015 \
        training.epochs=50 training.batch_size=64 \
        training.learning_rate=3e-4 training.schedule=constant training.warmup_steps=0 training.bf16=true -o outputs/dropout_50 \
        models.SAN.fields="$dropout" models.LSTM.fields="$dropout" models.ON-LSTM.fields="$dropout" models.hybrid.fields="$dropout"
    for fields in "$dropout" "${dropout/dropout: 0.2,/dropout: 0.0,}" "{attention_dropout: 0.1, activation_dropout: 0.1}" \
        "${dropout/\}/, self_attention_type: relative\}}"; do
        python scripts/experiments/logical_inference.py scripts/recipes/logic/logical_inference.yaml data.folder=logic_bowman2015 \
            training.epochs=1 \
            training.batch_size=64 training.learning_rate=3e-4 training.schedule=constant training.warmup_steps=0 \
            models.SAN.fields="$fields" models.LSTM=null models.ON-LSTM=null models.hybrid=null \
            -o outputs/dropout_1 --overwrite
    done
}

rnmt_connections() {
    recnmt train scripts/recipes/multi30k_en_de_small_rnnsearch.yaml --output outputs/rnnsearch
    recnmt train scripts/recipes/multi30k_en_de_small_rnnsearch_star.yaml --output outputs/rnnsearch_star
    recnmt train scripts/recipes/multi30k_en_de_small_rnnsearch_star.yaml model.fields.connections_without_relations=true --output outputs/connections
    recnmt train scripts/recipes/multi30k_en_de_small_rnmt.yaml --output outputs/rnmt
    recnmt evaluate outputs/rnnsearch_star/model-test_2016_flickr.de outputs/rnmt/model-test_2016_flickr.de \
        outputs/rnnsearch/model-test_2016_flickr.de outputs/connections/model-test_2016_flickr.de --references test_2016_flickr.de
    recnmt evaluate outputs/connections/model-test_2016_flickr.de outputs/rnmt/model-test_2016_flickr.de --references test_2016_flickr.de
    cat test_2016_flickr.en test_2017_flickr.en > both.en  # also concatenate the references and the three translations
    recnmt evaluate star.both.de rnmt.both.de rnnsearch.both.de --references both.de --source both.en --length-edges 8 12 16 20
    for file in both.de star.both.de rnmt.both.de; do
        awk 'NR == FNR {if (NF > 20) long[FNR]; next} FNR in long' both.en $file > long.$file
    done
    wc -w long.*
    recnmt evaluate long.star.both.de long.rnmt.both.de --references long.both.de
}

rnmt_zh_en() {
    recnmt train scripts/recipes/btec_zh_en_small_rnmt.yaml --output outputs/btec_rnmt
    recnmt train scripts/recipes/btec_zh_en_small_rnmt.yaml model.fields.relation_layers=0 --output outputs/btec_rnnsearch_star
    recnmt evaluate outputs/btec_rnnsearch_star/model-devset1_2.en outputs/btec_rnmt/model-devset1_2.en \
        --references devset1_2.en0 devset1_2.en1 --source devset1_2.zh --length-edges 5 10 15 --tokenize none
    python scripts/experiments/sweep.py scripts/recipes/zh_en_mix_small.yaml --rows scripts/recipes/rows/zh_en_mix.yaml \
        --output outputs/zh_en
    recnmt align outputs/zh_en/RNMT_renormalized/model --source dev450.zh --target dev450.en --gold dev450.align
    recnmt align outputs/zh_en/Transformer/model --source dev450.zh --target dev450.en --gold dev450.align --layer 2
    paste dev450.zh dev450.en | awk -F '\t' '{n = split($1, s, " "); m = split($2, t, " "); for (j = 0; j < m; j++) printf "%d-%d ", int(j * n / m), j; print ""}' > diagonal.links
    recnmt align --links diagonal.links --gold dev450.align
}

vrnmt() {
    python scripts/experiments/sweep.py scripts/recipes/btec_zh_en_small_rnmt.yaml --rows rows.yaml \
        --output outputs/btec   # rows.yaml:
    #   RNNsearch*: {model.fields.relation_layers: 0}
    #   VRNMT: {model.type: vrnmt, model.fields.kl_annealing_steps: 200, training.baseline_steps: 0.5}
    #   VRNMT from scratch: {model.type: vrnmt, model.fields.kl_annealing_steps: 400}
    recnmt train scripts/recipes/btec_zh_en_small_rnmt.yaml model.fields.relation_layers=0 training.max_steps=750 \
        model.init_from=outputs/btec/VRNMT/baseline/checkpoint-750 --output outputs/btec/two_stages
    recnmt evaluate outputs/btec/two_stages/model-devset1_2.en outputs/btec/VRNMT/model-devset1_2.en \
        --references devset1_2.en0 devset1_2.en1 --source devset1_2.zh --length-edges 5 10 15 --tokenize none  # and the other references
    recnmt evaluate model_cards/evidence/multi30k_table/{RNNsearch,VRNMT,RNMT}-1/translations/test_2016_flickr.de \
        --references data/multi30k/test_2016_flickr.de.gz
}

students() {
    recnmt train scripts/recipes/multi30k_en_de_small_table.yaml model.fields.self_attention_type=relative --output outputs/teacher
    recnmt translate outputs/teacher/model --input data/multi30k/train.en.gz --output outputs/teacher/train.de
    recnmt align outputs/teacher/model --layer 2 --source data/multi30k/train.en.gz --target outputs/teacher/train.de \
        --output outputs/teacher/train.links
    recnmt train scripts/recipes/multi30k_en_de_student.yaml training.max_steps=3000 --output outputs/student
    recnmt train scripts/recipes/multi30k_en_de_student_guided.yaml training.max_steps=3000 --output outputs/student_guided
    python scripts/benchmarks/translation.py --source test.en --references test.de --rounds 2 --types float32 bfloat16 int8 \
        --system teacher outputs/teacher/model 4 --system student outputs/student/model 1 \
        --system "student, guided" outputs/student_guided/model 1 --system student outputs/student_int8 1
}

"$1"
