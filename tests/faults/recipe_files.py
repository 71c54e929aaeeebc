"""Recipes and flags that a slip of the hand, an editor or a stranger has changed: accepted, or refused by name, at once."""

import importlib.util
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import yaml

SECONDS = 10.0  # on two busy cores; a user waits no longer for a typo
# Refused behind the recipe: what stands in this line was accepted.
ENDS = ("--job_index", "7", "--num_jobs", "2")
ACCEPTED = "--job_index 7"
VALUES = (
    "null",
    "true",
    "''",
    "-1",
    "0",
    "1e309",
    "-1e400",
    ".nan",
    ".inf",
    "9" * 6000,
    "0x" + "f" * 5000,
    "1_000",
    "[]",
    "{}",
    "[" * 5000 + "]" * 5000,
    "{a: " * 3000 + "1" + "}" * 3000,
    "!!python/object/apply:os.system ['true']",
    "&a [*a]",
    "2001-99-99",
    "'\\x00'",
    '"\\ud800"',
    "1:20:30",
    "~",
    "6e-4",
    "1e5",
    "''''",
    "🦣" * 2000,
    "- a\n- b",
    "|\n  text\n",
)

MODES = (
    "profile",
    "eval_only",
    "extend_steps",
    "push_pending",
    "verify",
    "help",
    "version",
    "recipe",
    "true",
    "null",
    "1",
    "-x",
)
BAD_NUMBERS = ("-1e-3", "-1", "-.5", "-inf", "-1_000", "-0x1", "-1e999")
CARDS = ("0", "1", "!!", "", "zzz", "-1", "yaml", "\x1b[2J", "_", "x" * 5000)


def flags(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Names of modes as values, flags twice in each spelling, numbers below 0, cards that nobody has."""
    for name in MODES:
        for flag in ((f"--run_name={name}",), ("--run_name", name)):
            yield f"a run named by {flag}", _trains(flag, name)
    for key in rng.sample(re.findall(r"^(\w+):", commands.RECIPE, re.MULTILINE), 12):
        for other in (f"--{key}", f"--{key.replace('_', '-')}"):
            yield f"--{key}, then {other}", _refused((f"--{key}", "1", other, "1"), key, key.replace("_", "-"))
            yield f"--{key}=1, then {other}=1", _refused((f"--{key}=1", f"{other}=1"), key, key.replace("_", "-"))
    for key in ("learning_rate", "max_steps", "validation_fraction"):
        for number in BAD_NUMBERS:
            words = (f"--{key}", number)
            yield " ".join(words), _refused(words, key, without=("expected one argument", "expected at least one"))
    for card in CARDS:
        for script in ("prepare_data.py", "check_setup.py"):
            words = ("--gpu", card)
            yield (
                f"{script} {words!r:.40}",
                _refused(words, "gpu", script=script, without=("a6000.yaml", "rtx", "multi_node", "_x8", "\x1b")),
            )
    yield from stated()


CANARY = "canary9secret"
LINK = f"https://canaryuser:{CANARY}@h/x?token={CANARY}"
SCRIPTS = {
    "train.py": ("--recipe", "tiny.yaml"),
    "prepare_data.py": ("--recipe", "tiny.yaml"),
    "generate.py": ("--model", "nowhere"),
    "export_model.py": ("nowhere", "--out", "out"),
    "post_train.py": ("--config", "nowhere.yaml"),
    "eval_hellaswag.py": ("--model", "nowhere"),
    "check_setup.py": (),
}
SECRETS = [(f"--{name}={CANARY}",) for name in ("api_key", "api-key", "hub_token", "password", "zzz")]
SECRETS += [("--api_key", CANARY), (f"--zzz={LINK}",), (f"--api_key={CANARY}=={CANARY}", f"--secret={CANARY}")]
# A command's words, then the pieces of each of its lines. None of it is made or begun.
REFUSED: list[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]] = [
    (("--max_stpes", "5"), (("--max_stpes: no such flag; did you mean --max_steps?",),)),
    (("--max_step", "5"), (("--max_step: no such flag; did you mean --max_steps?",),)),
    (("--lerning_rate=1", "--qqqqqq"), (("--lerning_rate: no such", "--learning_rate?"), ("--qqqqqq: no such flag",))),
    (("stray",), (("stray: is not a flag",),)),
    (("--data_files", LINK, "--data-files", f"{LINK}&v=1"), (("--data_files", "https://redacted@h/x", "given twice"),)),
    (("--max_steps", LINK), (("--max_steps https://redacted@h/x?redacted: must be an integer",),)),
    (("--max_steps", "1.5"), (("--max_steps 1.5: must be an integer",),)),
    (("--max_steps", "true", "--eval_steps", "x"), (("--max_steps true",), ("--eval_steps x: must be an integer",))),
    (("--push_to_hub", "yes"), (("--push_to_hub yes: must be true or false",),)),
    (("--push_to_hub", "True"), (("--push_to_hub True: must be true or false",),)),
    (("--max_steps", "0"), (("tiny.yaml: max_steps = 0: must be between 1 and",),)),
    (("--learning_rate", "nan"), (("learning_rate = nan: must be between 0.0 and 10.0",),)),
    (("--learning_rate", "inf"), (("learning_rate = inf: must be between",),)),
    (("--attn_pdrop", "0.991"), (("attn_pdrop = 0.991: must be between 0.0 and 0.99",),)),
    (("--adam_beta1", "1"), (("adam_beta1 = 1.0: must be between",),)),
    (("--optimizer", "adam"), (("optimizer = adam: must be adamw, adamw_8bit or muon; did you mean adamw?",),)),
    (("--max_steps", "none"), (("--max_steps none: must be an integer",),)),
    (
        ("--tokens_per_step", "65"),
        (("tokens_per_step = 65 must be a multiple of sequence_length = 16", "nearest is 64"),),
    ),
    (("--n_embd", "33"), (("n_embd = 33 must be a multiple of n_head = 2", "n_head 1 is"),)),
    (("--save_total_limit", "1"), (("save_total_limit = 1: two",),)),
    (("--token_column", "ids", "--tokenizer", "bpe"), (("token_column = ids: tokenizer = bpe is made from text",),)),
    (("--stream_keep", "consumed", "--data_dir", "d"), (("stream_keep = consumed deletes", "data_dir"),)),
    (("--report_to", "none", "wandb"), (("report_to = none wandb: none stands alone",),)),
    (("--report_to", "wandbb"), (("report_to = wandbb: must be", "did you mean wandb?"),)),
    (("--project_name", "a/b"), (("project_name = a/b: letters",),)),
    *(
        ((f"--run_name={name}",), (("run_name = '", "at most 64"),))
        for name in (".x", "a b", "x" * 65, "", "a/b", "../x")
    ),
    (("--optimizer", "adamw_8bit", "--shard_optimizer", "true"), (("optimizer = adamw_8bit with shard_optimizer",),)),
    (("--lr_scheduler_type", "wsd", "--decay_ratio", "0.9"), (("warmup_steps = 3", "overlap", "--decay_ratio 0.75"),)),
    (("--decay_ratio", "0.5"), (("decay_ratio = 0.5: has no effect with lr_scheduler_type = cosine",),)),
    (("--muon_momentum", "0.5"), (("muon_momentum = 0.5: has no effect with optimizer = adamw",),)),
    (("--rope_theta", "5"), (("rope_theta = 5.0: has no effect with architecture = gpt2",),)),
    (("--size", "d12", "--n_layer", "2"), (("--size d12 and --n_layer: both give the shape",),)),
    (("--size", "d13"), (("--size d13: must be d12, d24",),)),
    (("--data_dir", "hf://datasets/x"), (("data_dir = hf://datasets/x: must be a folder, or hf://",),)),
    (("--run_name", "\udcff"), (("run_name = ", "not UTF-8"),)),
    (("--recipe=a\nerror: b.yaml",), (("no such recipe",),)),
    (("--run_name", "a\nerror: b"), (("run_name = ",),)),
    (("--recipe=recpies/tiny.yaml",), (("recpies/tiny.yaml: no such recipe",),)),
    (("--recipe=.",), ((".: cannot be read as text: Is a directory",),)),
]
OF_TRAIN: list[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]] = [
    (("--push_pending", "runs/x", "--max_steps", "3"), (("--push_pending runs/x: stands alone",),)),
    (("--push_pending", "runs/x", "--eval_only"), (("--push_pending runs/x: stands alone",),)),
    (("--push_pending", "runs/x"), (("--push_pending runs/x: no such run folder",),)),
    (("--extend_steps", "x"), (("--extend_steps x: must be an integer",),)),
    (("--eval_only=1",), (("--eval_only",),)),
]
LLAMA = ("needs num_key_value_heads", "needs intermediate_size", "needs tie_word_embeddings", "needs rope_theta")
LLAMA += ("resid_pdrop = 0.1: has no effect with architecture = llama; use --resid_pdrop 0", "embd_pdrop = 0.1: has no")
# Lines of a recipe, in place of those of the same keys, and what is said of each.
IN_FILE: list[tuple[str, tuple[tuple[str, ...], ...]]] = [
    (f"api_key: {CANARY}", (("api_key: no such key; secrets come from the environment",),)),
    (
        f"hub_token: {CANARY}\nmy_secret: {CANARY}",
        (("hub_token: no such", "secrets"), ("my_secret: no such", "secrets")),
    ),
    ("max_stpes: 3", (("max_stpes: no such key; did you mean max_steps?",),)),
    ("max_steps: 3\nmax_steps: 4", (("line 48: max_steps is given twice (first in line 47)",),)),
    ("max_steps: true", (("max_steps = True: must be an integer, is true or false",),)),
    ("learning_rate: true\nadam_beta1: yes", (("learning_rate = True",), ("adam_beta1 = True: must be a number",))),
    ("max_steps: 3.0", (("max_steps = 3.0: must be an integer, is a number",),)),
    ("max_steps: '3'", (("max_steps = 3: must be an integer, is text; YAML reads this as text, write 3 without",),)),
    ("push_to_hub: 1", (("push_to_hub = 1: must be true or false, is an integer",),)),
    ("data_files: text.txt", (("data_files = text.txt: must be a list of texts, is text; write [text.txt]",),)),
    ("data_files: [1]", (("data_files = 1: must be a list of texts",),)),
    ("max_steps: null", (("max_steps = none: must be an integer",),)),
    ("max_steps: 1e999", (("max_steps = 1e999: must be an integer, is text",),)),
    ("learning_rate: .nan", (("learning_rate = nan: must be between",),)),
    (f"max_steps: {LINK}", (("max_steps = https://redacted@h/x?redacted: must be",),)),
    ("max_steps: !!int 3", (("line 47: !!int is a tag",),)),
    ("run_name: [" + "[" * 10 + "]" * 11, (("line 47: stands for more than 100,000 values, or nests more than 10",),)),
    ("run_name: 2001-99-99", (("line 47: 2001-99-99: month must be",),)),
    ("[a]: 3", (("line 47: a key must be a plain word",),)),
    ("a: b: c", (("line 47: mapping values are not allowed here",),)),
    ("#" * 2**20, (("not a recipe: has more than 1,048,576 bytes",),)),
    ("data_files: null\nsources: []", (("sources is empty",),)),
    (
        "data_files: null\nsources:\n- {weight: 0, dataset_name: x, dataset_nmae: y}\n- {data_files: [x], text_column: 3}",
        (
            ("sources, number 1: weight = 0: must be a number above 0",),
            ("sources, number 1: dataset_nmae: no such key; did you mean dataset_name?",),
            ("sources, number 2: weight is missing",),
            ("sources, number 2: text_column = 3: must be text",),
        ),
    ),
    (
        "architecture: llama",
        tuple((f"architecture = llama {need}",) for need in LLAMA[:4]) + tuple((n,) for n in LLAMA[4:]),
    ),
]
# What flags become, in the recipe that the run keeps.
BECOMES = {
    ("--max-steps=2",): ("max_steps", 2),
    ("--warmup_steps", "1e0"): ("warmup_steps", 1),
    ("--learning-rate", "6e-4"): ("learning_rate", 6e-4),
    ("--min_lr_ratio", ".5"): ("min_lr_ratio", 0.5),
    ("--sample_prompts", "a b", "the\n*", "null"): ("sample_prompts", ["a b", "the\n*", "null"]),
    ("--sample-steps", "2"): ("sample_steps", 2),
    ("--tags=--x",): ("tags", ["--x"]),
    ("--hub_private_repo", "false"): ("hub_private_repo", False),
    ("--per_device_train_batch_size", "auto"): ("per_device_train_batch_size", "auto"),
    ("--data_files", "text.txt", "a [b] 'c.txt"): ("data_files", ["text.txt", "a [b] 'c.txt"]),
    ("--report_to", "none"): ("report_to", None),
    ("--output_dir", "runs/a 'b\""): ("output_dir", "runs/a 'b\""),
}


def _becomes(folder: Path) -> str | None:
    commands.copy(base_of(folder), folder)
    (folder / "a [b] 'c.txt").write_text(commands.text(7, 300))
    words = [word for words in BECOMES for word in words]
    done = commands.run("train.py", "--recipe", "tiny.yaml", *words, cwd=folder)
    if done.code != 0:
        return commands.fault_of(done, "") or f"exit status {done.code}: {done.errors[0][:300]}"
    kept = folder / "runs" / "a 'b\"" / "recipe.yaml"
    found = yaml.safe_load(kept.read_text())
    if wrong := [(key, found.get(key)) for key, wanted in BECOMES.values() if found.get(key) not in (wanted, ["none"])]:
        return f"recipe.yaml has {wrong}"
    (folder / "again.yaml").write_bytes(kept.read_bytes())
    again = commands.run("train.py", "--recipe", "again.yaml", cwd=folder)
    if (
        again.code != 0
        or kept.read_bytes() != (folder / "again.yaml").read_bytes()
        or len(list((folder / "data").iterdir())) != 1
    ):
        return f"the recipe that a run keeps is not the same: {again.stderr[:300]}"
    return None


def _stated(
    script: str, words: tuple[str, ...], lines: tuple[tuple[str, ...], ...], file: str = "", rank: str = "0"
) -> Callable:
    """Return a case: exit status 2, so many lines with these pieces, no secret, and nothing made."""

    def hit(folder: Path) -> str | None:
        commands.copy(base_of(folder), folder)
        if file:
            keys = re.findall(r"^(\w+):", file, re.MULTILINE)
            kept = [line for line in commands.RECIPE.splitlines() if line.partition(":")[0] not in keys]
            kept += [""] * (46 - len(kept))
            (folder / "tiny.yaml").write_text("\n".join([*kept, *file.splitlines()]))
        before = sorted(folder.rglob("*"))
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
        done = commands.run(script, *words, cwd=folder, environment=world if rank != "0" else {})
        if done.code != 2 or "Traceback" in done.stderr or done.stdout:
            return f"exit status {done.code}: {done.stdout[-300:]}{done.stderr[-300:]}"
        found = done.stderr.splitlines()
        wanted = lines if rank == "0" else ()
        if len(found) != len(wanted) or any(not line.startswith("error: ") for line in found):
            return f"{len(found)} lines, not {len(wanted)}: {done.stderr[:600]}"
        for pieces in wanted:
            if not any(all(piece in line for piece in pieces) for line in found):
                return f"no line with {pieces}: {done.stderr[:600]}"
        if "canary" in done.stderr:
            return f"a secret is shown: {done.stderr[:300]}"
        made = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path not in before]
        return f"made, though refused: {made}" if made else None

    return hit


def stated() -> Iterator[tuple[str, Callable]]:
    """Secrets in flags that are none, of each script; each rule of recipes and flags; what flags become."""
    for script, words in SCRIPTS.items():
        if script == "post_train.py" and not importlib.util.find_spec("trl"):
            continue
        for secret in SECRETS:
            names = [(word.partition("=")[0] + ": ",) for word in secret if word.startswith("--")]
            yield f"{script} {secret[0].partition('=')[0]}", _stated(script, (*words, *secret), tuple(names))
    for rows, script in ((REFUSED, "prepare_data.py"), (OF_TRAIN, "train.py")):
        for words, lines in rows:
            recipe = () if words[0].startswith(("--recipe", "--push_pending")) else ("--recipe", "tiny.yaml")
            yield f"{script} {words!r:.60}", _stated(script, (*recipe, *words), lines)
    for file, lines in IN_FILE:
        yield f"{file!r:.60}", _stated("prepare_data.py", ("--recipe", "tiny.yaml"), lines, file)
    for words, lines in REFUSED[:2]:
        yield f"rank 1: {words}", _stated("train.py", ("--recipe", "tiny.yaml", *words), lines, rank="1")
    yield "what flags become", _becomes


def _trains(flag: tuple[str, ...], name: str) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        commands.copy(base_of(folder), folder)
        steps = ("--max_steps", "1", "--warmup_steps", "0", "--eval_steps", "0")
        done = commands.run("train.py", "--recipe", "tiny.yaml", *steps, *flag, cwd=folder)
        if done.code != 0:  # a name that begins with - is a flag's, where it is a word of its own
            may = name.startswith("-") or name in ("null", "true", "1")
            return commands.fault_of(done, "run_name", name) or (None if may else f"refused: {done.errors[0][:300]}")
        models = [path.parent.name for path in folder.glob("runs/*/model")]
        return None if models in ([name], ["tiny"] if name == "null" else [name]) else f"it trains {models}"

    return hit


def _refused(
    words: tuple[str, ...], *culprits: str, script: str = "prepare_data.py", without: tuple[str, ...] = ()
) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        commands.copy(base_of(folder), folder)
        recipe = ("--recipe", "tiny.yaml", *ENDS) if script == "prepare_data.py" else ()
        done = commands.run(script, *recipe, *words, cwd=folder, seconds=commands.SECONDS)
        said = [word for word in without if word in done.stderr]
        return commands.fault_of(done, *culprits) or (
            f"the line has {said[0]!r}: {done.errors[0][:300]}" if said else None
        )

    return hit


def base_of(folder: Path) -> Path:
    """Return the folder that cases copy."""
    return folder.parents[1] / "base"


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """500 recipes: values of other types and sizes, lines that came, went or moved, bits, YAML's own traps, flags."""
    recipes = [*sorted((commands.HERE.parents[1] / "recipes").glob("*.yaml")), base / "tiny.yaml"]
    for _ in range(500):
        path, how, seed = rng.choice(recipes), rng.choice(list(WAYS)), rng.random()

        def hit(folder: Path, path=path, how=how, seed=seed) -> str | None:
            dice, flags = random.Random(seed), []
            data = WAYS[how](path.read_bytes(), dice, flags)
            (folder / "attacked.yaml").write_bytes(data)
            flags = [flag for flag in flags if "\0" not in flag]  # which no command line can hold
            done = commands.run(
                "prepare_data.py", "--recipe", "attacked.yaml", *flags, *ENDS, cwd=folder, seconds=SECONDS
            )
            names = [word.removeprefix("--") for word in flags if word.startswith("--")]
            return commands.fault_of(done, ACCEPTED, "attacked.yaml", *names)

        yield f"{path.name}: {how}", hit


def _value(data: bytes, dice: random.Random, flags: list) -> bytes:
    lines = data.decode().splitlines()
    keys = [i for i, line in enumerate(lines) if re.match(r"\w+:", line)]
    place = dice.choice(keys)
    lines[place] = f"{lines[place].partition(':')[0]}: {dice.choice(VALUES)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _lines(data: bytes, dice: random.Random, flags: list) -> bytes:
    lines = data.splitlines(keepends=True)
    for _ in range(dice.randint(1, 4)):
        place, other = dice.randrange(len(lines)), dice.randrange(len(lines))
        way = dice.randrange(4)
        if way == 0 and len(lines) > 1:
            del lines[place]
        elif way == 1:
            lines.insert(other % len(lines), lines[place % len(lines)])
        elif way == 2:
            lines[place], lines[other] = lines[other], lines[place]
        else:
            lines[place] = b" " * dice.randint(1, 3) + lines[place]
    return b"".join(lines)


def _bits(data: bytes, dice: random.Random, flags: list) -> bytes:
    found = bytearray(data)
    for _ in range(dice.randint(1, 20)):
        found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
    return bytes(found)


def _noise(data: bytes, dice: random.Random, flags: list) -> bytes:
    place = dice.randrange(len(data))
    return data[:place] + dice.randbytes(dice.randint(1, 200)) + data[place:]


def _names(data: bytes, dice: random.Random, flags: list) -> bytes:
    keys = re.findall(rb"^\w+(?=:)", data, re.MULTILINE)
    key = dice.choice(keys)
    place = dice.randrange(len(key))
    other = key[:place] + bytes([dice.choice(b"abcdefgxyz_-. ")]) + key[place + dice.randrange(2) :]
    return data.replace(key + b":", other + b":", 1)


def _aliases(data: bytes, dice: random.Random, flags: list) -> bytes:
    bomb = ["x0: &x0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    bomb += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, dice.randint(2, 12))]
    keys = re.findall(rb"^\w+(?=:)", data, re.MULTILINE)
    key, last = dice.choice(keys), bomb[-1].partition(":")[0].encode()
    used = re.sub(rb"^" + key + rb":.*$", key + b": *" + last, data, flags=re.MULTILINE)
    return "\n".join(bomb).encode() + b"\n" + used


def _nested(data: bytes, dice: random.Random, flags: list) -> bytes:
    depth = dice.choice((50, 5000, 100_000))
    return data + b"\nsources: " + (b"[" if dice.random() < 0.5 else b"{a: ") * depth


def _flag(data: bytes, dice: random.Random, flags: list) -> bytes:
    keys = re.findall(r"^\w+(?=:)", data.decode(), re.MULTILINE)
    values = ("", "nan", "inf", "-inf", "-1", "9" * 6000, "1e999", "true", "null", "none", "auto", "\u0000", "é" * 300)
    flags += [f"--{dice.choice(keys)}", dice.choice(values)]
    return data


def _source(data: bytes, dice: random.Random, flags: list) -> bytes:
    each = dice.choice(
        (
            "{weight: .nan}",
            "{weight: 1, data_files: x}",
            "3",
            "null",
            "{1: 2}",
            "{[a]: b}",
            "{weight: " + "9" * 400 + "}",
        )
    )
    return data.replace(b"data_files:", b"old_files:") + f"\nsources:\n- {each}\n- {each}\n".encode()


WAYS: dict[str, Callable[[bytes, random.Random, list], bytes]] = {
    "a value": _value,
    "lines": _lines,
    "bits": _bits,
    "noise": _noise,
    "a key's name": _names,
    "aliases": _aliases,
    "nested": _nested,
    "a flag": _flag,
    "a source": _source,
}
