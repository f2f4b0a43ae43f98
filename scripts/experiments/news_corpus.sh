#!/usr/bin/env bash
# Writes the training text of scripts/recipes/deen_news_small.yaml into data/deen_news, from the corpora of deen_mix_base.yaml whose
# sentences are as long as those of the test sets: Wikipedia, Europarl, web pages and news. Tokenized text is detokenized.
set -euo pipefail
mkdir -p data/deen_news
for language in de en; do
    {
        for corpus in mlqe_pe_ende wmt_sample10k_ende; do
            gzip -dc "data/$corpus/train.$language.gz" | sacremoses --language "$language" detokenize
        done
        for set in newssyscomb2009 newstest2008 newstest2009 newstest2010 newstest2011 newstest2012; do
            gzip -dc "data/wmt_news_deen/$set.$language.gz"
        done
    } | gzip --no-name > "data/deen_news/train.$language.gz"
done
