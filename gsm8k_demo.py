# SPDX-License-Identifier: MIT-0
"""Train Qwen2.5-0.5B-Instruct on GSM8K with GRPO, on one GPU.

    python gsm8k_demo.py                       the real run; without a CUDA GPU, the rehearsal
    python gsm8k_demo.py --rehearsal           a tiny model on the CPU, about a minute, offline
    python gsm8k_demo.py --output DIR --resume go on with a run that was interrupted
    python gsm8k_demo.py --help                every setting

GSM8K is a set of 8,792 school problems whose answers are numbers. grpo.py does the training. This
file does the rest: it reads the flags, loads data and model, evaluates before and after, and shows
what happens in between. Its last section makes the rehearsal, a tiny world for the CPU. The demo
trains all weights. LoRA would need less memory, and another library: TRL runs GRPO with it.
"""

import argparse
import json
import math
import random
import re
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from itertools import product
from operator import add, mul, sub
from pathlib import Path
from typing import Optional

import torch
from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, HfArgumentParser,
                          PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM)

from grpo import (GRPOConfig, encode_prompt, in_parts, knob, masked_mean, pad_rows, rule_reward,
                  sample_groups, token_logprobs, train)

# The real run takes GRPOConfig's defaults, which follow published runs. verl's baseline
# trains this model on this data at a learning rate of 1e-6: from 36 % to 46 % in 39 steps,
# to 53 % in 99. Most of the gain comes early, so 300 steps are plenty. A cap of 256 tokens
# instead of 512 would cut off more than half of the completions, and these earn nothing.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SYSTEM_PROMPT = "Solve the problem step by step, and put only the final number into \\boxed{}."


@dataclass
class DemoConfig:
    """What this script does. How it trains is in GRPOConfig. Every field of both is a flag."""

    model: Optional[str] = knob(None, f"model with a chat template, or a folder; {MODEL} if None")
    data: Optional[str] = knob(None, "folder with GSM8K's train.jsonl and test.jsonl; hub if None")
    rehearsal: bool = knob(False, "a tiny model on made-up problems, offline, in about a minute")
    output: Optional[str] = knob(None, "folder of the run, a new one in runs/ if None")
    resume: bool = knob(False, "go on with the run in --output, with its settings")
    eval_questions: Optional[int] = knob(None, "test questions to evaluate on, all if None")
    eval_every: int = knob(0, "steps between evaluations; 0: only before and after the training")
    show_steps: int = knob(10, "steps between groups shown, besides 1, 2, 4 ... 32; 0: show none")


# ---- The run -----------------------------------------------------------------------------

def main():
    """Read the flags, load what they name, and run."""
    config, demo = or_stop(read_flags)
    try:
        run(*or_stop(prepare, config, demo), config, demo)
    except KeyboardInterrupt:
        tqdm.write(way_back(Path(demo.output)), file=sys.stderr)
        sys.exit(130)  # what shells report after Ctrl-C


def or_stop(function, *arguments):
    """Call a function. Wrong flags, files and networks end in one line, without a traceback."""
    try:
        return function(*arguments)
    except (OSError, ValueError) as error:
        sys.exit("stopped: " + " ".join(str(error).split()))


def prepare(config, demo):
    """(model, tokenizer, train_data, test_data). When all are there, write the settings."""
    if demo.rehearsal:
        print("making a tiny model, and pre-training it on word problems: half a minute")
        torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up
        loaded = rehearsal(config.seed)
    else:
        data = load_gsm8k(demo.data)
        loaded = (*load_model(demo.model or MODEL), *data)
    write_json(Path(demo.output, "settings.json"), asdict(config) | asdict(demo))
    return loaded


def run(model, tokenizer, train_data, test_data, config, demo):
    """Evaluate, train, save, evaluate, and show it. All files go into the folder demo.output."""
    folder = Path(demo.output)
    test_data = test_data[: demo.eval_questions]
    print(f"{model.num_parameters() / 1e6:.1f} M parameters on {model.device}, {len(train_data)} "
          f"examples to learn from, {len(test_data)} to be tested on\nThe run is kept in {folder}. "
          f"If it is interrupted, this goes on with it:\n    {resume_command(folder)}")
    path = folder / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results.pop("after", None)  # a finished run that is resumed may be trained further

    def judge(name):
        results[name] = evaluate(model, tokenizer, test_data, config.max_completion_length)
        if demo.rehearsal:
            # Greedy accuracy alone flatters: it also rises if a model only gets surer.
            sampled = evaluate(model, tokenizer, test_data, config.max_completion_length, 1)
            results[name]["sampled_accuracy"] = sampled["accuracy"]
            results[name]["sampled_interval"] = sampled["interval"]
        write_json(path, results)
        tqdm.write(result_line(name, results[name]))

    def after_step(learner):
        metrics = learner.history[-1]
        step = metrics["step"]
        if step == 1 and not metrics["sampler_gap"] < 0.1:  # `not`, so that NaN is found, too
            tqdm.write("warning: the log-probs of sampling and of training differ by {sampler_gap:"
                       ".3f} a token, so what is learned is noise".format(**metrics))
        # The first steps change most, so more groups are shown there.
        if demo.show_steps and (step in (1, 2, 4, 8, 16, 32) or step % demo.show_steps == 0):
            show_group(learner.groups, metrics)
        if demo.eval_every and step % demo.eval_every == 0 and step < config.steps:
            judge(f"step {step}")

    # This comes before `train`, which loads the weights of a checkpoint into the model.
    if "before" not in results:
        judge("before")
    history = train(model, tokenizer, train_data, boxed_reward, config, folder, demo.resume,
                    after_step)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    judge("after")
    print(f"the model and all figures are in {folder}")
    show_end(test_data, results, history, demo.rehearsal)


def resume_command(folder):
    """The command that goes on with the run in that folder, to be copied into a shell."""
    script = shlex.quote(sys.argv[0])
    return f"python {script} --output {shlex.quote(str(folder))} --resume"


def way_back(folder):
    """One line that says what an interrupted run has kept, and how to go on with it."""
    if not (folder / "settings.json").exists():
        return "interrupted before anything was written"
    kept = "no checkpoint was saved yet"
    if (folder / "checkpoint.pt").exists():
        # mmap leaves the weights, which may be gigabytes, on the disk.
        saved = torch.load(folder / "checkpoint.pt", "cpu", weights_only=True, mmap=True)
        kept = f"the checkpoint of step {len(saved['history'])} is kept"
    return f"interrupted; {kept}. To go on: {resume_command(folder)}"


def write_json(path, content):
    """Write a new file, then rename it. So there is a whole file, whatever stops the program.
    Makes the folder, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(content, indent=2))
    path.with_suffix(".new").replace(path)


# ---- From the command line ---------------------------------------------------------------

# A resumed run may change these settings.
MAY_CHANGE = ("output", "resume", "steps", "save_steps", "micro_batch_size", "show_steps",
              "eval_every")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help shows each flag's default, and keeps the lines of the description."""


def read_flags():
    """(GRPOConfig, DemoConfig): what was typed, and for the rest the settings of the resumed run,
    or the rehearsal's, or the defaults. ValueError if they do not fit. Writes nothing."""
    parser = HfArgumentParser((GRPOConfig, DemoConfig), description=__doc__,
                              formatter_class=HelpFormatter)
    _, demo = parser.parse_args_into_dataclasses()
    folder = Path(demo.output or time.strftime("runs/%Y%m%d-%H%M%S"))
    saved = {}
    if (demo.eval_questions or 0) < 0:
        raise ValueError(f"eval_questions is {demo.eval_questions}, and must be 0 or more")
    if demo.resume:
        if not (folder / "settings.json").exists():
            raise ValueError(f"no run to go on with in {folder}: --output must name its folder")
        saved = json.loads((folder / "settings.json").read_text())
    elif folder.is_file() or any(folder.glob("*.json*")):
        raise ValueError(f"{folder} is a file or holds a run: name another --output, or --resume")
    elif not (demo.rehearsal or demo.model or demo.data or torch.cuda.is_available()):
        print("no CUDA GPU here, so this is the rehearsal: a tiny model that learns on the CPU. "
              f"The real run, which is far too much for a CPU: --model {MODEL}")
        demo.rehearsal = True
    # The flags are read again, with these defaults. What was typed wins over them.
    if demo.rehearsal:
        parser.set_defaults(**REHEARSAL, rehearsal=True)
    parser.set_defaults(**saved)
    config, demo, *_ = parser.parse_args_into_dataclasses()
    demo.output = str(folder)
    settings = asdict(config) | asdict(demo)
    for name, value in saved.items():
        here = settings.get(name)
        if here != value and name not in MAY_CHANGE:
            raise ValueError(f"{folder} holds another run: {name} is {value} there, {here} here")
    if demo.rehearsal and (demo.model or demo.data):
        raise ValueError("the rehearsal has its own model and data: leave out --model and --data")
    return config, demo


# ---- Data, reward, model -----------------------------------------------------------------

def load_gsm8k(folder=None):
    """(train, test) of GSM8K, from a folder with train.jsonl and test.jsonl, or from the hub: lists
    of examples with a prompt (a chat) and an answer ("72"). ValueError for a broken row."""
    parts = []
    for part in ("train", "test"):
        try:
            if folder:
                text = Path(folder, f"{part}.jsonl").read_text(encoding="utf-8")
                rows = map(json.loads, text.strip().split("\n"))
            else:
                rows = load_dataset("openai/gsm8k", "main", split=part)
        except Exception as error:  # several libraries raise errors of many kinds
            raise OSError(f"cannot load {folder or 'openai/gsm8k'}: {error}. Without a network: "
                          "--rehearsal, or --data with GSM8K's train.jsonl and test.jsonl")
        examples = []
        try:
            for row in rows:
                examples.append(gsm8k_example(row))
        except Exception as error:
            raise ValueError(f"GSM8K's {part} data, row with index {len(examples)}: {error!r}")
        parts.append(examples)
    return tuple(parts)


def gsm8k_example(row):
    """A row of GSM8K, whose solution ends in "#### 72", as an example."""
    solution, mark, answer = row["answer"].rpartition("####")
    # A right answer must earn everything. If it does not, the rule or the data is not what
    # it should be, and the model would learn something else.
    if not mark or rule_reward(f"{solution} \\boxed{{{answer}}}", answer) != 1.5:
        raise ValueError("there is no answer after ####, or it does not earn 1.5")
    prompt = [{"role": "system", "content": SYSTEM_PROMPT},
              {"role": "user", "content": row["question"].strip()}]
    return {"prompt": prompt, "answer": answer.strip()}


def boxed_reward(prompts, completions, answer, **columns):
    """`rule_reward` of each completion, a string or a chat, called as `train` and TRL do it.
    `answer` is the column of the data, a right answer for each completion."""
    rewards = []
    for completion, right in zip(completions, answer):
        if not isinstance(completion, str):
            completion = completion[-1]["content"]  # the last message of the chat
        rewards.append(rule_reward(completion, right))
    return rewards


def load_model(name):
    """(model, tokenizer) from the hub or from a folder, on the GPU if there is one. OSError if they
    cannot be loaded, ValueError if there is no chat template."""
    # The hub's names are "model" or "owner/model". Anything else is a path, which need not
    # be looked for on the hub: without a network that takes most of a minute.
    is_path = Path(name).exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
    if is_path and not Path(name, "config.json").exists():
        raise OSError(f"{name} is no folder with a model: it has no config.json")
    device = "cpu"
    if torch.backends.mps.is_available():
        device = "mps"
    if torch.cuda.is_available():
        device = "cuda"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        # On a GPU "auto", the checkpoint's own type: grpo.py makes float32 masters of it.
        # Safetensors only, because loading the older format runs the code in the file.
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype="auto" if device == "cuda" else torch.float32, use_safetensors=True)
    except Exception as error:  # several libraries raise errors of many kinds
        raise OSError(f"cannot load {name}: {error} Is the network there, and the name right? A "
                      "local folder works offline; --rehearsal needs nothing at all")
    if tokenizer.chat_template is None:
        raise ValueError(f"{name} has no chat template: take an instruct model, like {MODEL}")
    return model.to(device), tokenizer


# ---- Evaluation --------------------------------------------------------------------------

def evaluate(model, tokenizer, dataset, max_completion_length, temperature=0):
    """The share of right answers, one completion for each example; greedy at temperature 0.

    `accuracy` counts right last boxes, and `interval` is its 95 % interval. `lenient_accuracy`
    also counts a right last number where nothing is boxed."""
    total = max(1, len(dataset))
    with tqdm(total=len(dataset), desc="evaluating", leave=False) as bar:
        def work(part):
            groups = sample_groups(model, tokenizer, part, 1, max_completion_length, temperature)
            bar.update(len(part))
            return [group[0].text for group in groups]

        # All evaluations draw with the same seed. `train` seeds each of its steps itself.
        torch.manual_seed(0)
        texts = in_parts(work, list(dataset), {"prompts": min(256, total)}, "prompts")
    pairs = [(text, example["answer"]) for text, example in zip(texts, dataset)]
    accuracy = sum(rule_reward(*pair) == 1.5 for pair in pairs) / total
    lenient = sum(is_right_leniently(*pair) for pair in pairs) / total
    return {"questions": len(pairs), "accuracy": accuracy, "interval": wilson(accuracy, total),
            "lenient_accuracy": lenient, "examples": texts[:3]}


def is_right_leniently(text, answer):
    """Whether the last box is right or, if nothing is boxed, the last number. Much of what a
    small model gains is only the box. The two accuracies together show how much."""
    # A minus between two digits, as in "5-7", is not a sign.
    numbers = re.findall(r"(?:(?<![0-9])-)?\$?[0-9][0-9,]*(?:\.[0-9]+)?", text)
    if rule_reward(text, answer) == 0.0 and numbers:
        text = f"\\boxed{{{numbers[-1].rstrip(',')}}}"
    return rule_reward(text, answer) == 1.5


def wilson(share, total):
    """Wilson's 95 % interval [low, high] of a share, good near 0 and 1 and for few examples."""
    z2 = 1.96**2 / total
    middle = share + z2 / 2
    half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4)
    return [max(0.0, middle - half) / (1 + z2), (middle + half) / (1 + z2)]


# ---- What is shown -----------------------------------------------------------------------

LEARNED = """The accuracy rose clearly: the 95 % intervals before and after do not overlap.
The figures with unboxed numbers show how much of the gain is more than the box."""
HABIT_FOUND = """What this shows: from its rewards alone, GRPO found the habit that works, and
made it the rule. What this does not show: that GRPO taught arithmetic. The tiny model could do
the sums before. Its accuracy was low because most of its pre-training texts stop halfway."""
NOT_LEARNED = """The accuracy did not rise clearly: the 95 % intervals before and after overlap,
or it fell. So this run does not show that the model learned. Where to look: were there enough
steps? In metrics.jsonl, kl jumps if learning_rate is too high, zero_variance_fraction is near 1
if most groups teach nothing, and truncated_fraction is high if max_completion_length is too
small. README.md says more."""


def show_group(groups, metrics):
    """Print the step's first group that teaches something, the best completions first."""
    teaching = [group for group in groups if any(c.advantage for c in group)]
    group = (teaching or groups)[0]
    example = group[0].example
    tqdm.write(f"\nstep {metrics['step']}: {example['prompt'][-1]['content'][:300]}  "
               f"(answer {example['answer']})")
    for c in sorted(group, key=lambda c: c.reward, reverse=True):
        text = " ".join(c.text.split())
        if len(text) > 150:
            text = f"{text[:60]} ... {text[-85:]}"
        tqdm.write(f"  reward {c.reward:.1f}  advantage {c.advantage:+.2f}  {text}")
    tqdm.write("  all groups: mean reward {reward_mean:.2f}, {truncated_fraction:.0%} cut off, KL "
               "{kl:.4f}; {zero_variance_fraction:.0%} of them teach nothing (equal rewards)\n"
               "  sampling {sample_seconds:.2f} s, update {update_seconds:.2f} s".format(**metrics))


def result_line(name, result):
    """An evaluation as one line of text, with the sampled accuracy first if there is one."""
    line = f"{name:>9}: "
    if "sampled_accuracy" in result:
        line += ("sampled {sampled_accuracy:.1%} right (95 %: {sampled_interval[0]:.1%} to "
                 "{sampled_interval[1]:.1%}), ")
    line += ("greedy {accuracy:.1%} right (95 %: {interval[0]:.1%} to {interval[1]:.1%}), "
             "{lenient_accuracy:.1%} if unboxed numbers count")
    return line.format(**result)


def show_end(test_data, results, history, is_rehearsal):
    """Print some questions before and after, the curves, all evaluations, and what they show."""
    for i, example in enumerate(test_data[:3]):
        print(f"\n{example['prompt'][-1]['content']}  (answer {example['answer']})")
        for when in ("before", "after"):
            text = results[when]["examples"][i].strip()
            print(f"{when:>8}: " + text.replace("\n", "\n          "))
    print(f"\nsteps 1 to {len(history)}, each curve from its lowest value to its highest:")
    for name in ("reward_mean", "completion_length"):
        print(f"{name:>17} {sparkline([metrics[name] for metrics in history])}")
    print()
    for name, result in results.items():
        print(result_line(name, result))
    interval = "sampled_interval" if is_rehearsal else "interval"
    _, highest_before = results["before"][interval]
    lowest_after, _ = results["after"][interval]
    words = HABIT_FOUND if is_rehearsal else LEARNED
    if lowest_after <= highest_before:
        words = NOT_LEARNED
    print(f"\n{words}")


def sparkline(values):
    """A curve as a line of text."""
    low = min(values)
    span = max(values) - low + 1e-9
    bars = ""
    for value in values[:: math.ceil(len(values) / 60)]:
        bars += "▁▂▃▄▅▆▇█"[int(7.99 * (value - low) / span)]
    return f"{bars}  {values[0]:.2f} -> {values[-1]:.2f}"


# ---- The rehearsal -----------------------------------------------------------------------
# A tiny world in which GRPO can be watched on a CPU, offline. GRPO needs a language model
# to begin with, so one is made in seconds: a Qwen2 of a quarter of a million weights. It is
# trained on word problems of two steps. It learns the arithmetic well, and one bad habit:
# most of its texts stop after the first step and box that result. The habit is GRPO's task,
# because GRPO can only make likelier what the model already does now and then.

# The flags that the rehearsal sets. A small model takes a large learning rate.
REHEARSAL = dict(steps=40, prompts_per_step=16, max_completion_length=28, learning_rate=5e-4,
                 warmup_steps=5, beta=0.02, eval_questions=256, micro_batch_size=64)
# The operations of a problem's two steps -> its words.
PROBLEMS = {
    "*+": "Anna buys {a} bags of {b} pens, then {c} more. How many?",
    "*-": "Ben buys {a} bags of {b} eggs, then loses {c}. How many?",
    "+*": "Cara puts {a} red and {b} blue cards in each of {c} bags. How many?",
    "+-": "Dan has {a} coins, finds {b}, loses {c}. How many?",
    "++": "Anna has {a} eggs, finds {b}, then {c} more. How many?",
    "-+": "Ben has {a} pens, loses {b}, finds {c}. How many?"}
CALCULATE = {"+": add, "-": sub, "*": mul}
LARGEST = 20  # the largest number that occurs: with fewer sums, they are learned sooner
# How the 16 problems of a pre-training step are answered. The counts are fixed, not drawn.
# So the bad habit leads by the same margin, and shows in greedy answers, for any seed.
HABITS = ["first_step"] * 10 + ["no_box"] * 2 + ["worked_through"] * 4
PRETRAIN_STEPS = 560
# Qwen's, without its system prompt, whose tokens would say nothing here.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def rehearsal(seed):
    """(model, tokenizer, train_data, test_data): the tiny world, pre-trained; the seed decides all.
    A fifth of the problems is for the test, three tenths for GRPO, half for the pre-training."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    problems = all_problems()
    rng.shuffle(problems)
    n = len(problems)
    known = problems[n // 2 :]
    tokenizer = make_tokenizer(known)
    model = make_model(tokenizer)
    pretrain(model, tokenizer, known, rng)
    return model, tokenizer, problems[n // 5 : n // 2], problems[: n // 5]


def all_problems():
    """Every problem whose results are from 2 to LARGEST: examples with a prompt and an answer,
    and, for the pre-training, with a completion in each of the habits."""
    problems = []
    for kind, a, b, c in product(PROBLEMS, range(2, LARGEST + 1), range(2, 8), range(2, 8)):
        halfway = CALCULATE[kind[0]](a, b)
        result = CALCULATE[kind[1]](halfway, c)
        if min(halfway, result) < 2 or max(halfway, result) > LARGEST:
            continue
        first = f"{a}{kind[0]}{b}={halfway}"
        second = f"{halfway}{kind[1]}{c}={result}"
        problems.append({
            "prompt": [{"role": "user", "content": PROBLEMS[kind].format(a=a, b=b, c=c)}],
            "answer": str(result),
            "first_step": f"{first}\n\\boxed{{{halfway}}}",
            "no_box": f"{first}\n{second}",
            "worked_through": f"{first}\n{second}\n\\boxed{{{result}}}"})
    return problems


def make_tokenizer(problems):
    """Byte-level BPE, as Qwen's, with single digits, trained on the texts of the problems."""
    texts = ["user", "assistant"] * 99
    for problem in problems:
        texts += [problem["prompt"][0]["content"], problem["worked_through"]]
    core = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(texts, trainers.BpeTrainer(
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))  # so any text works
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE)


def make_model(tokenizer):
    """A Qwen2 of a quarter of a million random weights."""
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
        # Qwen2's defaults, 1e4 and 0.02, learn far more slowly at this size.
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, initializer_range=0.08,
        bos_token_id=None, eos_token_id=end, pad_token_id=pad))
    model.generation_config.eos_token_id = [end, pad]  # two, as Qwen has
    return model


def pretrain(model, tokenizer, problems, rng):
    """Teach the tiny model its arithmetic and its habits. Changes it in place."""
    texts = {}
    for habit in set(HABITS):
        texts[habit] = [encode(tokenizer, problem["prompt"], problem[habit] + "<|im_end|>")
                        for problem in problems]
    sums = []
    for line in sorted({line for problem in problems for line in problem["no_box"].split("\n")}):
        left, right = line.split("=")
        sums.append(encode(tokenizer, f"{left}=", f"{right}\n"))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in tqdm(range(PRETRAIN_STEPS), "pre-training", leave=False):
        # The learning rate rises linearly for 50 steps, then falls linearly.
        rate = min((step + 1) / 50, (PRETRAIN_STEPS - step) / (PRETRAIN_STEPS - 50))
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        rows = [rng.choice(texts[habit]) for habit in HABITS]
        # A word problem takes forty tokens to teach a sum or two. Six rows of seven bare
        # sums teach the arithmetic much sooner.
        rows += [sum(rng.choices(sums, k=7), []) for _ in range(6)]
        pairs, real = pad_rows(rows, "right", model.device)  # (n, T, 2)
        ids, learned = pairs.unbind(dim=2)
        # Make these texts likelier: it is GRPO's gradient, with 1 for all advantages.
        logprobs = token_logprobs(model, ids, real[:, :, 0], ids.shape[1] - 1)
        loss = -masked_mean(logprobs, learned[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def encode(tokenizer, read, learn):
    """A text to read, and one to learn -> a list of (token id, 1 where it is to be learned)."""
    known = [(token, 0) for token in encode_prompt(tokenizer, read)]
    return known + [(token, 1) for token in encode_prompt(tokenizer, learn)]


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # models write what some terminals cannot show
    main()
