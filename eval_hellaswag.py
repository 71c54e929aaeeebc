r"""Score a model on HellaSwag: a run, a model folder, or any causal language model of the Hub.

    python eval_hellaswag.py --model runs/gpt2_124m
    accelerate launch --quiet --multi_gpu eval_hellaswag.py --model openai-community/gpt2-xl \
        --output scores.jsonl

The script prints three scores with their standard errors next to those of GPT-2, and then one JSON
line on standard output. See eval_tasks.py for other tasks.
"""

import functools
import sys

import eval_tasks

parse = functools.partial(eval_tasks.parse, task="hellaswag")
main = functools.partial(eval_tasks.main, task="hellaswag")

if __name__ == "__main__":
    sys.exit(main())
