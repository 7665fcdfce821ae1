# SPDX-License-Identifier: MIT-0
"""Train Qwen2.5-0.5B-Instruct on GSM8K with GRPO, on one GPU.

    python gsm8k_demo.py                       the real run, on a CUDA GPU
    python gsm8k_demo.py --rehearsal           a tiny model on the CPU, a minute
    python gsm8k_demo.py --model FOLDER        another model; slow on a CPU
    python gsm8k_demo.py --output DIR --resume go on with an interrupted run
    python gsm8k_demo.py --help                every setting

GSM8K is a set of 8,792 school problems whose answers are numbers. grpo.py does
the training. This file reads the flags, loads data and model, evaluates before
and after, and shows it. Without a CUDA GPU, the first command is the rehearsal,
the last section of this file. With --model, a CPU does the real run: a default
step takes over an hour there. All weights are trained. For LoRA, there is TRL."""

import argparse
import json
import math
import random
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from itertools import product
from operator import add, mul, sub
from pathlib import Path

import torch
from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, HfArgumentParser,
                          PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM)

from grpo import (GRPOConfig, MAY_CHANGE, autocast, chunks, encode_prompt, masked_mean, pad_rows,
                  rule_reward, sample_groups, setting, token_logprobs, train)

# The real run takes GRPOConfig's defaults, which follow published runs. verl's PPO baseline trains
# this model at the same rate, 1e-6: from 36 % to 46 % in 39 steps, to 53 % in 99. 300 are plenty.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SYSTEM_PROMPT = "Solve the problem step by step, and put only the final number into \\boxed{}."


@dataclass
class DemoConfig:
    """What this script does. How it trains is in GRPOConfig. Every field of both is a flag."""
    model: str | None = setting(None, f"name or folder, with a chat template; {MODEL} if None")
    data: str | None = setting(None, "folder with GSM8K's train.jsonl and test.jsonl; hub if None")
    rehearsal: bool = setting(False, "a tiny model on made-up problems, offline, in about a minute")
    output: str | None = setting(None, "folder of the run, a new one in runs/ if None")
    resume: bool = setting(False, "go on with the run in --output, with its settings")
    eval_questions: int | None = setting(None, "test questions to evaluate on, all if None")
    eval_every: int = setting(0, "steps between evaluations; 0: only before and after the training")
    show_steps: int = setting(10, "steps between groups shown; also 1, 2, 4 ... 32; 0: no groups")


# ---- The run -----------------------------------------------------------------------------
def main():
    """Read the flags, load what they name, and run. What goes wrong is said in one line."""
    demo = None
    try:
        config, demo = read_flags()
        run(*load(config, demo), config, demo)
    except (OSError, ValueError) as error:
        sys.exit("stopped: " + " ".join(str(error).split()))
    except torch.OutOfMemoryError:
        sys.exit(f"stopped: out of memory. {memory_advice(config, demo.output)}")
    except KeyboardInterrupt:
        said = "interrupted before anything was written"
        if demo and Path(demo.output, "settings.json").exists():
            said = f"interrupted. To go on: {resume_command(demo.output)}"
        print(said, file=sys.stderr)
        sys.exit(130)  # what shells report after Ctrl-C


def load(config, demo):
    """(model, tokenizer, train_data, test_data). When all are there, write the settings."""
    if demo.rehearsal:
        print("making a tiny model, and pre-training it on word problems: half a minute")
        torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up
        model, tokenizer, train_data, test_data = rehearsal(config.seed)
    else:
        train_data, test_data = load_gsm8k(demo.data)
        model, tokenizer = load_model(demo.model or MODEL)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and config.max_completion_length >= context:
        raise ValueError(f"max_completion_length is {config.max_completion_length}, but the "
                         f"model can read only {context} tokens, with the prompt")
    write_json(Path(demo.output, "settings.json"), vars(config) | vars(demo))
    return model, tokenizer, train_data, test_data


def run(model, tokenizer, train_data, test_data, config, demo):
    """Evaluate, train, save, evaluate, and show it. All files go into the folder demo.output."""
    folder = Path(demo.output)
    test_data = test_data[: demo.eval_questions]
    print(f"{model.num_parameters() / 1e6:.1f} M parameters on {model.device}, {len(train_data)} "
          f"examples to learn from, {len(test_data)} to be tested on\nThe run is kept in {folder}. "
          f"To go on after an interruption:\n    {resume_command(folder)}")
    path = folder / "results.json"
    results = read_json(path) if path.exists() else {}
    results.pop("after", None)  # a finished run that is resumed may be trained further
    gaps = []  # sampler_gap of each step made now

    def judge(name):
        def score(temperature):
            return evaluate(model, tokenizer, test_data, config.max_completion_length, temperature,
                            config.sampling_batch_size, config.bf16)
        results[name] = score(0)
        if demo.rehearsal:
            # Greedy accuracy alone flatters: it also rises if a model only gets surer.
            sampled = score(1)
            results[name] |= {"sampled_accuracy": sampled["accuracy"],
                              "sampled_interval": sampled["interval"]}
        write_json(path, results)
        tqdm.write(result_lines(name, results[name]))

    def after_step(learner):
        metrics = learner.history[-1]
        step = metrics["step"]
        if metrics["sampler_gap"] >= 0.1 > max(gaps, default=0):
            tqdm.write("warning: for the same token, the log-probs of sampling and of training\n"
                       f"differ by {metrics['sampler_gap']:.3f} on average: one of them is wrong")
        gaps.append(metrics["sampler_gap"])
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
    if not gaps:
        print(f"nothing was left to train: the run has {len(history)} steps")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    judge("after")
    show_end(folder, test_data, results, history, demo.rehearsal)


def resume_command(folder):
    """The command that goes on with the run in that folder, to be copied into a shell."""
    return (f"python {shlex.quote(Path(sys.argv[0]).as_posix())} "
            f"--output {shlex.quote(Path(folder).as_posix())} --resume")


def memory_advice(config, folder):
    """What helps the run whose memory has just run out: one line."""
    where = traceback.format_exc()  # it has "in NAME" for each function that was at work
    sampling = re.search(" in (judge|sample_and_grade)\n", where)
    flag = "sampling_batch_size" if sampling else "micro_batch_size"
    half = getattr(config, flag) // 2
    # In these functions, memory is taken by the weights, or by what AdamW keeps for each weight.
    if not half or re.search(" in (load|make_learner|open_folder|step)\n", where):
        return "A new run needs less with a smaller --model or --max_completion_length, or --beta 0"
    return f"Lower --{flag}. To go on: {resume_command(folder)} --{flag} {half}"


def read_json(path):
    """The object in a JSON file. ValueError, with the file's name, if there is none."""
    try:
        return json.loads(path.read_text()) | {}
    except (ValueError, TypeError):
        raise ValueError(f"{path} is damaged: it holds no JSON object")


def write_json(path, content):
    """Write a new file, in a folder that may be new, and rename it: never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=2))
    new.replace(path)


# ---- From the command line ---------------------------------------------------------------
# A resumed run may change what `train` lets it change, and these.
MAY_CHANGE += ("output", "resume", "show_steps", "eval_every")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help shows each flag's default, and keeps the lines of the description."""


class Parser(HfArgumentParser):
    """Makes a flag of each field of the dataclasses. Wrong flags are a ValueError."""

    def error(self, message):
        raise ValueError(f"{message} (--help shows all flags)")


def read_flags():
    """(GRPOConfig, DemoConfig). A setting is what was typed, else what the resumed run has, else
    the rehearsal's, else the default. ValueError or OSError for what cannot be. Keeps no file."""
    parser = Parser((GRPOConfig, DemoConfig), description=__doc__, formatter_class=HelpFormatter,
                    allow_abbrev=False)
    typed = parser.parse_args()
    folder = Path(typed.output or time.strftime("runs/%Y%m%d-%H%M%S"))
    saved = {}
    if typed.resume:
        if not (folder / "settings.json").exists():
            raise ValueError(f"no run to go on with in {folder}: --output must name its folder")
        saved = read_json(folder / "settings.json")
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds a run or other files: name another --output, or --resume")
    elif not (typed.rehearsal or typed.model or typed.data or torch.cuda.is_available()):
        print("no CUDA GPU here, so this is the rehearsal: a tiny model that learns on the CPU.\n"
              "The real run is slow here: on two cores, a 0.5B model took 270 s for a step with\n"
              f"    --model {MODEL} --prompts_per_step 4\n"
              "    --num_generations 4 --max_completion_length 256 --eval_questions 64\n"
              "By default, a step has 16 times as many completions, of up to 512 tokens. An\n"
              "evaluation on 200 questions took 14 minutes. By default, it is on all 1,319.")
        typed.rehearsal = True
    # The flags are read once more, with other defaults. What was typed wins over all of them.
    if typed.rehearsal:
        parser.set_defaults(**REHEARSAL)
    parser.set_defaults(**saved)
    settings = vars(parser.parse_args()) | {"output": str(folder)}
    settings["rehearsal"] |= typed.rehearsal  # even after "--rehearsal False"
    # `train` refuses other settings, too, but only after the loading and the evaluation.
    for name, there in saved.items():
        if name not in MAY_CHANGE and settings[name] != there:
            raise ValueError(f"{folder} holds another run: {name} is {there} there, "
                             f"{settings[name]} here")
    config, demo = parser.parse_dict(settings)
    if demo.rehearsal and (demo.model or demo.data):
        raise ValueError("the rehearsal has its own model and data: leave out --model and --data")
    questions = demo.eval_questions
    if min(demo.eval_every, demo.show_steps) < 0 or questions is not None and questions < 1:
        raise ValueError(f"eval_every is {demo.eval_every}, show_steps {demo.show_steps}, "
                         f"eval_questions {questions}: wanted are at least 0, 0 and 1")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    tempfile.TemporaryDirectory(dir=folder).cleanup()  # OSError if the folder cannot be written
    return config, demo


# ---- Data, reward, model -----------------------------------------------------------------
def load_gsm8k(folder=None):
    """(train, test) of GSM8K, from a folder with train.jsonl and test.jsonl, or from the hub: lists
    of examples with a prompt (a chat) and an answer ("72"). ValueError for what cannot be read."""
    parts = []
    for part in ("train", "test"):
        examples = []
        try:
            if folder:
                text = Path(folder, f"{part}.jsonl").read_text(encoding="utf-8")
                rows = map(json.loads, text.strip().split("\n"))
            else:
                rows = load_dataset("openai/gsm8k", "main", split=part)
            for row in rows:
                examples.append(gsm8k_example(row))
        except Exception as error:  # several libraries raise errors of many kinds
            raise ValueError(f"cannot load {folder or 'openai/gsm8k'}: {part} data, row with index "
                             f"{len(examples)}: {error!r}. What works without a network: "
                             "--rehearsal, or --model and --data that name folders")
        parts.append(examples)
    return tuple(parts)


def gsm8k_example(row):
    """A row of GSM8K, whose solution ends in "#### 72", as an example."""
    solution, mark, answer = row["answer"].rpartition("####")
    # A right answer must earn everything, or the model would learn something else.
    if not mark or rule_reward(f"{solution} \\boxed{{{answer}}}", answer) != 1.5:
        raise ValueError("there is no answer after ####, or rule_reward cannot read it")
    prompt = [{"role": "system", "content": SYSTEM_PROMPT},
              {"role": "user", "content": row["question"].strip()}]
    return {"prompt": prompt, "answer": answer.strip()}


def boxed_reward(prompts, completions, answer, **columns):
    """`rule_reward` of each completion, a string or a chat. `train` and TRL call it alike."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [rule_reward(text, right) for text, right in zip(texts, answer)]


def load_model(name):
    """(model, tokenizer) from the hub or from a folder, on the GPU if there is one. OSError if they
    cannot be loaded, ValueError if there is no chat template."""
    # The hub's names are "model" or "owner/model". Anything else is a path, which need not
    # be looked for on the hub: without a network that takes most of a minute.
    is_path = Path(name).exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
    if is_path and not Path(name, "config.json").exists():
        raise OSError(f"{name} is no folder with a model: it has no config.json")
    device = ("cuda" if torch.cuda.is_available() else
              "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        # As float32, since `train` makes it so: before and after, it must be the same model.
        # Safetensors only, because loading the older format runs the code in the file.
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32,
                                                     use_safetensors=True)
    except Exception as error:  # several libraries raise errors of many kinds
        advice = "" if is_path else "Is the network there, and the name right? Offline: --rehearsal"
        raise OSError(f"cannot load {name}: {error} {advice}")
    if tokenizer.chat_template is None:
        raise ValueError(f"{name} has no chat template: take an instruct model, like {MODEL}")
    return model.to(device), tokenizer


# ---- Evaluation --------------------------------------------------------------------------
def evaluate(model, tokenizer, dataset, max_completion_length, temperature=0,
             sampling_batch_size=256, bf16=None):
    """The share of right answers, one completion for each example; greedy at temperature 0.

    `accuracy` counts right last boxes, and `interval` is its 95 % interval. `lenient_accuracy`
    also counts a right last number where nothing is boxed. `bf16` is as in `autocast`."""
    total = len(dataset)
    texts = []
    # All evaluations draw with the same seed. `train` seeds each of its steps itself.
    torch.manual_seed(0)
    # `autocast`, because training computes in it, too: another precision gives other scores.
    with tqdm(None, "evaluating", total, leave=False) as bar, autocast(model, bf16):
        for part in chunks(list(dataset), sampling_batch_size):
            texts += [group[0].text for group in sample_groups(
                model, tokenizer, part, 1, max_completion_length, temperature)]
            bar.update(len(part))
    pairs = [(text, example["answer"]) for text, example in zip(texts, dataset)]
    accuracy = sum(rule_reward(*pair) == 1.5 for pair in pairs) / total
    lenient = sum(is_right_leniently(*pair) for pair in pairs) / total
    return {"questions": total, "accuracy": accuracy, "interval": wilson(accuracy, total),
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
The figures with unboxed numbers show how much was gained apart from the box."""
HABIT_FOUND = """What this shows: from its rewards alone, GRPO found the habit that works, and
made it the rule. What this does not show: that GRPO taught arithmetic. The tiny
model could do the sums before. Its accuracy was low because most of its
pre-training texts stop halfway."""
FELL = """The accuracy fell clearly: the model got worse. In metrics.jsonl, a kl that
stays above 1 says that learning_rate is too high, and an entropy near 0 that the
model got sure too soon. README.md says more."""
NOT_LEARNED = """The accuracy neither rose nor fell clearly: the 95 % intervals before and after
overlap. So this run does not show that the model learned. Were there enough
steps and eval_questions? In metrics.jsonl, zero_variance_fraction is near 1 if
most groups teach nothing, and truncated_fraction is high if completions are cut
off: raise max_completion_length. README.md says more."""


def show_group(groups, metrics):
    """Print the step's first group that teaches something: the best completions first, and those
    that look alike in one line."""
    group = next((group for group in groups if any(c.advantage for c in group)), groups[0])
    example = group[0].example
    tqdm.write(f"\nstep {metrics['step']}: {example['prompt'][-1]['content']}  "
               f"(answer {example['answer']})")
    lines = Counter()
    for c in sorted(group, key=lambda c: c.reward, reverse=True):
        text = " ".join(c.text.split())
        if len(text) > 42:
            text = f"{text[:10]} ... {text[-27:]}"
        lines[f"reward {c.reward:.1f}  advantage {c.advantage:+.2f}  {text}"] += 1
    for line, count in lines.items():
        tqdm.write(f"  {count} x  {line}")
    tqdm.write("  all groups: mean reward {reward_mean:.2f}, KL {kl:.4f}, cut off "
               "{truncated_fraction:.0%}\n  groups with equal rewards {zero_variance_fraction:.0%}"
               "; sampling {sample_seconds:.2f} s, update {update_seconds:.2f} s".format(**metrics))


def result_lines(name, result):
    """An evaluation as text, with the sampled accuracy first if there is one."""
    text = f"{name:>9}: "
    if "sampled_accuracy" in result:
        text += ("sampled {sampled_accuracy:.1%} right (95 % interval: "
                 "{sampled_interval[0]:.1%} to {sampled_interval[1]:.1%})\n" + 11 * " ")
    text += ("greedy {accuracy:.1%} right ({interval[0]:.1%} to {interval[1]:.1%}), "
             "{lenient_accuracy:.1%} with unboxed numbers")
    return text.format(**result)


def show_end(folder, test_data, results, history, is_rehearsal):
    """Print some questions before and after, the curves, all evaluations, and what they show."""
    for i, example in enumerate(test_data[:3]):
        print(f"\n{example['prompt'][-1]['content']}  (answer {example['answer']})")
        for when in ("before", "after"):
            text = results[when]["examples"][i].strip()
            print(f"{when:>8}: " + text.replace("\n", "\n          "))
    rewards = [metrics["reward_mean"] for metrics in history]
    curve = "".join("▁▂▃▄▅▆▇█"[int(5.3 * reward)]
                    for reward in rewards[:: math.ceil(len(rewards) / 60)])
    print(f"\nthe mean reward of steps 1 to {len(rewards)}, on a scale from 0 to 1.5:\n"
          f"    {curve}  {rewards[0]:.2f} -> {rewards[-1]:.2f}\n")
    print("\n".join(result_lines(*item) for item in results.items()))
    interval = "sampled_interval" if is_rehearsal else "interval"
    lowest_before, highest_before = results["before"][interval]
    lowest_after, highest_after = results["after"][interval]
    words = NOT_LEARNED
    if lowest_after > highest_before:
        words = HABIT_FOUND if is_rehearsal else LEARNED
    elif highest_after < lowest_before:
        words = FELL
    print(f"\n{words}\n\nThe model and all figures are in {folder}. To ask the model:\n"
          f"    from transformers import pipeline\n    pipeline('text-generation', "
          f"{str(folder)!r})([{{'role': 'user', 'content': '...'}}])")


# ---- The rehearsal -----------------------------------------------------------------------
# A tiny world in which GRPO can be watched on a CPU, offline. GRPO needs a language model
# to begin with, so one is made in seconds: a Qwen2 of a quarter of a million weights. It is
# trained on word problems of two steps. It learns the arithmetic well, and a bad habit:
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
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(texts, trainers.BpeTrainer(
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))  # so any text works
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE)


def make_model(tokenizer):
    """A Qwen2 of a quarter of a million random weights."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
        # Qwen2's defaults, 1e4 and 0.02, learn far more slowly at this size.
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, initializer_range=0.08,
        eos_token_id=end, pad_token_id=pad))
    model.generation_config.eos_token_id = [end, pad]  # two, as Qwen has
    return model


def pretrain(model, tokenizer, problems, rng):
    """Teach the tiny model its arithmetic and its habits. Changes it in place."""
    texts = {habit: [encode(tokenizer, problem["prompt"], problem[habit] + "<|im_end|>")
                     for problem in problems] for habit in set(HABITS)}
    sums = []
    for line in sorted({line for problem in problems for line in problem["no_box"].split("\n")}):
        left, right = line.split("=")
        sums.append(encode(tokenizer, f"{left}=", f"{right}\n"))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in tqdm(range(PRETRAIN_STEPS), "pre-training", leave=False):
        # The learning rate rises linearly for 50 steps, then falls linearly.
        optimizer.param_groups[0]["lr"] = 3e-3 * min(
            (step + 1) / 50, (PRETRAIN_STEPS - step) / (PRETRAIN_STEPS - 50))
        rows = [rng.choice(texts[habit]) for habit in HABITS]
        # Six rows of seven bare sums teach the arithmetic much sooner than word problems do.
        for _ in range(6):
            chosen = rng.choices(sums, k=7)
            rows.append({name: sum((text[name] for text in chosen), []) for name in chosen[0]})
        ids, mask = pad_rows([row["ids"] for row in rows], "right", model.device)  # (n, T)
        learned, _ = pad_rows([row["learned"] for row in rows], "right", model.device)  # (n, T)
        # Make these texts likelier: GRPO's gradient of "dapo", with 1 for all advantages.
        logprobs = token_logprobs(model, ids, mask, ids.shape[1] - 1)  # (n, T-1)
        loss = -masked_mean(logprobs, learned[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def encode(tokenizer, read, learn):
    """A text to read and one to learn: the ids of their tokens, and 1 for those to be learned."""
    known, new = encode_prompt(tokenizer, read), encode_prompt(tokenizer, learn)
    return {"ids": known + new, "learned": [0] * len(known) + [1] * len(new)}


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # models write what some terminals cannot show
    main()
