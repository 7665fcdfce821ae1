# SPDX-License-Identifier: MIT-0
"""Train Qwen2.5-0.5B-Instruct on GSM8K with GRPO, on one GPU.

    python gsm8k_demo.py                       the real thing; without a CUDA GPU, the rehearsal
    python gsm8k_demo.py --rehearsal           a tiny model on the CPU, about a minute, offline
    python gsm8k_demo.py --output DIR --resume go on with a run that was interrupted
    python gsm8k_demo.py --help                every knob

The training itself is grpo.py's. Here is what stands around it: the run, from one evaluation to
the other; its data and reward, its model, the evaluation, what is shown meanwhile, and the flags.
At the end stands the rehearsal, a tiny world in which all of it can be watched.

All weights are trained. LoRA would save memory (Adam's and the gradients' share, not the
activations'), for another library and another set of knobs: peft has it, and TRL runs GRPO with
it.
"""

import argparse
import itertools
import json
import math
import random
import re
import sys
import time
from dataclasses import asdict, dataclass
from operator import add, mul, sub
from pathlib import Path
from typing import Optional

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, HfArgumentParser,
                          PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM)

from grpo import (GRPOConfig, check_prompts, encode_prompt, in_parts, knob, masked_mean, pad_rows,
                  rule_reward, sample_groups, token_logprobs, training_steps)

# The defaults of the real run are GRPOConfig's: 32 questions x 8 answers = 256 answers a step at
# learning rate 1e-6, 512 tokens, temperature 1, clip 0.2. Evidence: verl's baseline trains this
# model on this data at 1e-6 with 256 prompts a step (36 % -> 46 % after 39 steps, 53 % after 99,
# at most 58 %), and a scaling study takes Qwen3-0.6B-Base from 41 % to 68 % in 56 steps at the same
# rate. Most of the gain comes early, so 300 steps are plenty. On a GPU, sampling 256 answers takes
# hardly longer than sampling 8, since each token waits for the launch of kernels and not for
# arithmetic. A cap of 512 tokens: at 256, more than half of this model's answers are cut off, and
# earn nothing.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SYSTEM_PROMPT = "Solve the problem step by step, and put only the final number into \\boxed{}."
CHAT = """chat with it:
    from transformers import pipeline
    chat = pipeline("text-generation", {output!r})
    messages = [{{"role": "system", "content": {system!r}}},
                {{"role": "user", "content": "Tom has 3 boxes of 12 eggs and drops 5. How many?"}}]
    print(chat(messages, max_new_tokens=512)[0]["generated_text"][-1]["content"])"""


@dataclass
class DemoConfig:
    """What this script is to do; all else is GRPOConfig's. Every field of the two is a flag."""

    model: Optional[str] = knob(None, "a causal LM with a chat template, or its folder")
    data: Optional[str] = knob(None, "a folder with GSM8K's train.jsonl and test.jsonl")
    rehearsal: bool = knob(False, "a tiny model on made-up problems, offline, in about a minute")
    output: Optional[str] = knob(None, "folder of the run; default: a new one in runs/")
    resume: bool = knob(False, "go on with the run in --output")
    eval_questions: Optional[int] = knob(None, "test questions to evaluate on; default: all")
    eval_every: int = knob(0, "evaluate every so many steps too; 0: only before and after")
    show_steps: int = knob(10, "show one group of answers every so many steps; 0: never")


# ---- The run -----------------------------------------------------------------------------------


def run(model, tokenizer, train_data, test_data, config, demo):
    """Evaluate, train, evaluate, save. All that is kept goes into the folder `demo.output`."""
    print(f"{model.num_parameters() / 1e6:.1f} M parameters on {model.device}, {len(train_data)} "
          f"questions to learn from, {len(test_data)} to be tested on")
    folder = Path(demo.output)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "settings.json", asdict(config) | asdict(demo))
    results = {}
    if demo.resume and (folder / "results.json").exists():
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))

    def judge(name):
        results[name] = evaluate(model, tokenizer, test_data, config.max_completion_length,
                                 sampled=demo.rehearsal)
        write_json(folder / "results.json", results)
        tqdm.write(show_result(name, results))

    # A resumed run may lack it. Here is the last chance: `training_steps` puts the checkpoint into
    # the model.
    if "before" not in results:
        judge("before")
    due = range(0, config.steps, demo.eval_every or config.steps)[1:]  # steps to evaluate after
    for metrics, learner in training_steps(model, tokenizer, train_data, boxed_reward, config,
                                           folder, demo.resume):
        step = metrics["step"]
        if step == 1 and not metrics["sampler_gap"] <= 0.1:  # NaN is not below anything either
            tqdm.write("warning: sampler and scorer are {sampler_gap:.3f} nats a token apart, so "
                       "what is learned is noise.\nDoes this model take other masks or positions "
                       "than grpo.py gives it?".format(**metrics))
        if demo.show_steps and (step == 1 or step % demo.show_steps == 0):
            show_group(learner.groups, metrics, folder)
        if step in due:
            judge(f"step {step}")
    # Saved before it is evaluated, in which something may go wrong.
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    judge("after")
    show_end(test_data, results, due, folder)


def write_json(path, content):
    """Write beside the old file, then in its place: whatever happens, there is a whole one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=2), encoding="utf-8")
    new.replace(path)


# ---- Data and reward ---------------------------------------------------------------------------


def load_gsm8k(folder=None):
    """GSM8K, from a folder with its train.jsonl and test.jsonl, or else from the hub.

    Returns [train, test], datasets with the columns prompt (a chat) and answer ("72"). OSError
    where there is nothing to load, ValueError for a broken row.
    """
    parts = []
    for part in ("train", "test"):
        source = f"openai/gsm8k, {part}"
        try:
            if folder:
                source = Path(folder, f"{part}.jsonl")
                lines = source.read_text(encoding="utf-8").strip().split("\n")
            else:
                lines = load_dataset("openai/gsm8k", "main", split=part)
        except Exception as error:  # they are of several libraries, and of many kinds
            raise OSError(f"cannot load {source} ({error}). Without a network: --rehearsal, or "
                          "--data and a folder with GSM8K's train.jsonl and test.jsonl") from error
        examples = []
        for place, line in enumerate(lines, 1):
            try:
                examples.append(gsm8k_example(json.loads(line) if folder else line))
            except Exception as error:
                raise ValueError(f"{source}, line {place}: {error!r} in {line!r:.200}") from error
        parts.append(Dataset.from_list(examples))
    return parts


def gsm8k_example(row):
    """One row of GSM8K, {"question", "answer"}, as an example with a prompt and an answer."""
    solution, mark, answer = row["answer"].rpartition("####")  # it ends in "#### 1,234"
    # Seconds before hours: a right answer must earn everything. If it does not, the rule or the
    # data is not what it is taken for, and the model would be taught something else.
    solved = f"{solution} \\boxed{{{answer}}}"
    if not mark or rule_reward(solved, answer) != 1.5:
        raise ValueError("there is no answer after ####, or it does not earn 1.5")
    prompt = [{"role": "system", "content": SYSTEM_PROMPT},
              {"role": "user", "content": row["question"].strip()}]
    return {"prompt": prompt, "answer": answer.strip()}


def boxed_reward(prompts, completions, answer, **columns):
    """`rule_reward` over a batch, called as `train` and TRL call a reward function.

    `completions` are strings or chats, `answer` is the data's column of that name, one string for
    each completion. Returns a list of floats.
    """
    rewards = []
    for completion, right in zip(completions, answer):
        if not isinstance(completion, str):
            completion = completion[-1]["content"]  # a chat: its last message is the answer
        rewards.append(rule_reward(completion, right))
    return rewards


# ---- The model ---------------------------------------------------------------------------------


def load_model(name):
    """Returns (model, tokenizer) of that name, or in that folder, on the GPU if there is one.

    OSError if they cannot be loaded, ValueError if there is no chat template.
    """
    device = "cpu"
    dtype = torch.float32
    if torch.backends.mps.is_available():
        device = "mps"
    if torch.cuda.is_available():
        device = "cuda"
        dtype = "auto"  # the checkpoint's own, for the evaluation before; grpo.py sees to the rest
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        # Safetensors only: to load the older format is to run whatever it holds.
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True)
    except Exception as error:  # they are of several libraries, and of many kinds
        raise OSError(f"cannot load {name}: {error} Is the network there, and the name right? A "
                      "local folder works offline; --rehearsal needs nothing at all") from error
    if tokenizer.chat_template is None:
        raise ValueError(f"{name} has no chat template; take an instruct model, like {MODEL}")
    return model.to(device), tokenizer


# ---- Evaluation --------------------------------------------------------------------------------


def evaluate(model, tokenizer, dataset, max_completion_length=512, sampled=False):
    """Accuracy of greedy answers to a dataset with the columns `prompt` and `answer`.

    `sampled` adds the accuracy at temperature 1, one answer to each question: greedy accuracy
    alone flatters, since it also rises when a model merely becomes surer of what it did most
    often before. Returns the dict that stands in results.json. It seeds the random numbers, which
    the training does not mind, since each of its steps seeds them anew.
    """
    examples = list(dataset)
    prompts = [example["prompt"] for example in examples]
    answers = [example["answer"] for example in examples]
    total = max(len(examples), 1)
    at_once = {"questions": min(256, total)}

    def answer_all(temperature):
        def work(parts):
            groups = []
            for part in tqdm(parts, "evaluating", leave=False):
                groups += sample_groups(model, tokenizer, part, 1, temperature=temperature,
                                        max_completion_length=max_completion_length)
            return [group[0].text for group in groups]

        torch.manual_seed(0)
        return in_parts(work, prompts, at_once, "questions")

    texts = answer_all(temperature=0)
    right = sum(map(is_right, texts, answers))
    lenient = sum(is_right(text, answer, lenient=True) for text, answer in zip(texts, answers))
    result = {"questions": len(examples), "accuracy": right / total,
              "interval": wilson(right, len(examples)), "lenient_accuracy": lenient / total,
              "examples": texts[:3]}
    if sampled:
        result["sampled_accuracy"] = sum(map(is_right, answer_all(1.0), answers)) / total
    return result


def is_right(text, answer, lenient=False):
    """Strict: the last box holds the answer. Lenient: if nothing is boxed, the last number. Much
    of what a small model gains is the box, and the difference of the two shows how much."""
    if lenient and rule_reward(text, answer) == 0.0:
        # A minus between two digits, as in "5-7", is no sign.
        numbers = ["", *re.findall(r"(?:(?<![0-9])-)?\$?[0-9][0-9,]*(?:\.[0-9]+)?", text)]
        text = f"\\boxed{{{numbers[-1].rstrip(',')}}}"
    return rule_reward(text, answer) == 1.5


def wilson(right, total):
    """Wilson's 95 % interval [low, high] of a share: honest near 0 and 1 and for few questions."""
    if total == 0:
        return [0.0, 1.0]
    share = right / total
    z2 = 1.96**2 / total
    middle = share + z2 / 2
    half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4)
    return [max(0.0, middle - half) / (1 + z2), (middle + half) / (1 + z2)]


# ---- What is shown -----------------------------------------------------------------------------


def show_group(groups, metrics, folder):
    """Print the step's first group that teaches something, best answer first, and keep it in
    samples.jsonl. (What is done again after a resume stands there twice.)"""
    teaching = [group for group in groups if any(answer.advantage for answer in group)]
    group = [*teaching, groups[0]][0]
    example = group[0].example
    question = example["prompt"][-1]["content"]
    tqdm.write(f"\nstep {metrics['step']}: {question[:300]}  (answer {example['answer']})")
    for answer in sorted(group, key=lambda answer: answer.reward, reverse=True):
        text = " ".join(answer.text.split())
        if len(text) > 150:
            text = f"{text[:60]} ... {text[-85:]}"
        tqdm.write(f"  reward {answer.reward:.1f}  advantage {answer.advantage:+.2f}  {text}")
    tqdm.write("  in this step: mean reward {reward_mean:.2f}; {truncated_fraction:.0%} of the "
               "answers were cut off;\n  in {zero_variance_fraction:.0%} of the groups all earned "
               "the same: these teach nothing; KL {kl:.4f}\n  sampling {sample_seconds:.2f} s, "
               "scoring {score_seconds:.2f} s, update {update_seconds:.2f} s".format(**metrics))
    kept = {"step": metrics["step"], **example, "completions": [answer.text for answer in group],
            "rewards": [answer.reward for answer in group]}
    with open(folder / "samples.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(kept) + "\n")


def show_result(name, results):
    """The evaluation of that name as one line of text."""
    if name not in results:
        return f"{name:>9}: missing, because the run was interrupted there"
    result = results[name]
    low, high = result["interval"]
    line = (f"{name:>9}: {result['accuracy']:.1%} of {result['questions']} right (95 %: {low:.1%} "
            f"to {high:.1%}), {result['lenient_accuracy']:.1%} if unboxed numbers count")
    if "sampled_accuracy" in result:
        line += f", {result['sampled_accuracy']:.1%} sampled"
    return line


def show_end(test_data, results, due, folder):
    """The same questions before and after, the curves, and what came out."""
    pairs = zip(test_data, results["before"]["examples"], results["after"]["examples"])
    for example, before, after in pairs:
        print(f"\n{example['prompt'][-1]['content']}  (answer {example['answer']})")
        for when, text in (("before", before), ("after", after)):
            print(f"{when:>8}: " + text.strip().replace("\n", "\n          "))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    history = [json.loads(line) for line in lines]
    print(f"\nsteps 1 to {len(history)}, each curve from its lowest value to its highest:")
    for name, key in (("reward", "reward_mean"), ("tokens", "completion_length")):
        print(f"{name:>9} {sparkline([metrics[key] for metrics in history])}")
    print()
    for name in ("before", *[f"step {step}" for step in due], "after"):
        print(show_result(name, results))
    print(f"everything is in {folder}")


def sparkline(values):
    """A curve in one line of text, from its lowest value to its highest."""
    low = min(values)
    span = max(values) - low + 1e-9
    bars = ""
    for value in values[:: math.ceil(len(values) / 60)]:
        bars += "▁▂▃▄▅▆▇█"[int(7.99 * (value - low) / span)]
    return f"{bars}  {values[0]:.2f} -> {values[-1]:.2f}"


# ---- From the command line ---------------------------------------------------------------------


def main():
    """Load what the flags name, and run it."""
    try:
        config, demo = read_flags()
        if not demo.rehearsal:
            train_data, test_data = load_gsm8k(demo.data)
            model, tokenizer = load_model(demo.model or MODEL)
            check_prompts(model, tokenizer, [*train_data, *test_data], config)
    except (OSError, ValueError) as error:
        # A flag, a file or the network is to blame, and a line says all. What goes wrong later is
        # a defect, and keeps its traceback.
        sys.exit("stopped: " + " ".join(str(error).split()))
    if demo.rehearsal:
        print("a tiny model is made, and pre-trained on word problems: half a minute")
        torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up
        model, tokenizer, train_data, test_data = rehearsal(config.seed)
    test_data = list(test_data)[: demo.eval_questions]
    run(model, tokenizer, train_data, test_data, config, demo)
    print(HONEST if demo.rehearsal else CHAT.format(output=demo.output, system=SYSTEM_PROMPT))


def read_flags():
    """Returns (GRPOConfig, DemoConfig): what was typed, and for the rest the settings of the run
    that is resumed, or the rehearsal's. ValueError if they do not fit. Writes nothing."""
    parser = HfArgumentParser((GRPOConfig, DemoConfig), description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    _, demo = parser.parse_args_into_dataclasses()
    folder = Path(demo.output or time.strftime("runs/%Y%m%d-%H%M%S"))
    saved = {}
    kept = ("settings.json", "metrics.jsonl", "config.json")
    if demo.resume:
        if not (folder / "settings.json").exists():
            raise ValueError(f"no run to go on with in {folder}: is --output the right folder?")
        saved = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    elif any((folder / name).exists() for name in kept):
        raise ValueError(f"{folder} holds a run, or a model: --resume goes on with a run. Or name "
                         "another --output")
    elif not (demo.rehearsal or demo.model or demo.data or torch.cuda.is_available()):
        print("no CUDA GPU here, so this is the rehearsal: a tiny model that learns on the CPU. "
              f"The real thing, which is far too much for a CPU: --model {MODEL}")
        demo.rehearsal = True
    # The flags are read once more, with other defaults, over which wins what was typed.
    if demo.rehearsal:
        parser.set_defaults(**REHEARSAL, rehearsal=True)
    parser.set_defaults(**saved)
    config, demo = parser.parse_args_into_dataclasses()
    demo.output = str(folder)
    if demo.rehearsal and (demo.model or demo.data):
        raise ValueError("the rehearsal has a model and data of its own: leave out --model and "
                         "--data")
    may_change = ("output", "resume", "show_steps", "save_steps", "micro_batch_size")
    settings = asdict(config) | asdict(demo)
    for name, value in saved.items():
        if settings[name] != value and name not in may_change:
            raise ValueError(f"{folder} holds another run: there {name} is {value}, here "
                             f"{settings[name]}")
    return config, demo


# ---- The rehearsal -----------------------------------------------------------------------------
#
# A tiny world in which GRPO can be watched from start to end on a CPU, offline. A language model
# has to be there before it can be reinforced, so one is made in seconds: a Qwen2 with a quarter of
# a million weights and a tokenizer of its own, pre-trained on made-up word problems of two steps.
# It learns the arithmetic well, and from its texts a bad habit with it: most of them stop after
# the first step and box that. GRPO's job is the habit, not the arithmetic: it can only make
# likelier what the model already does now and then.

HONEST = """What this shows: by its rewards alone, GRPO found the habit that works, and made it
the rule. What it does not show: that it taught arithmetic. The tiny model could do the sums
before; its low start was made, by texts most of which stop halfway."""
# Flags that the rehearsal sets, unless they are typed. A small model takes a large learning rate.
REHEARSAL = dict(steps=40, prompts_per_step=16, max_completion_length=28, learning_rate=5e-4,
                 warmup_steps=5, beta=0.02, eval_questions=256, micro_batch_size=128)
# The operations of a problem's two steps -> its words.
PROBLEMS = {
    "*+": "Anna buys {a} bags of {b} pens, then {c} more. How many?",
    "*-": "Ben buys {a} bags of {b} eggs, then loses {c}. How many?",
    "+*": "Cara puts {a} red and {b} blue cards in each of {c} bags. How many?",
    "+-": "Dan has {a} coins, finds {b}, loses {c}. How many?",
    "++": "Anna has {a} eggs, finds {b}, then {c} more. How many?",
    "-+": "Ben has {a} pens, loses {b}, finds {c}. How many?",
}
CALCULATE = {"+": add, "-": sub, "*": mul}
LARGEST = 20  # number to occur: the fewer the sums, the sooner they are learned
# How the texts of one pre-training step answer: so many of each in every step, not drawn, so that
# the bad habit leads by the same margin, and greedy answers show it, whatever the seed.
HABITS = ["first_step"] * 10 + ["no_box"] * 2 + ["worked_through"] * 4
PRETRAIN_STEPS = 560
# Qwen's, without its system prompt: here that would be tokens that say nothing.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def rehearsal(seed):
    """Returns (model, tokenizer, train_dataset, test_dataset): the tiny world, pre-trained.

    A fifth of the problems is held out for the test, three tenths are for GRPO, half for the
    pre-training. The same seed gives the same weights.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    problems = all_problems()
    rng.shuffle(problems)
    n = len(problems)
    known = problems[n // 2 :]
    tokenizer = make_tokenizer(known)
    model = make_model(tokenizer)
    pretrain(model, tokenizer, known, rng)
    train_data = Dataset.from_list(problems[n // 5 : n // 2])
    test_data = Dataset.from_list(problems[: n // 5])
    return model, tokenizer, train_data, test_data


def all_problems():
    """Every problem whose results are from 2 to LARGEST, as an example with a prompt, the answer,
    and what texts of each habit say to it."""
    problems = []
    small = range(2, 8)
    for kind, a, b, c in itertools.product(PROBLEMS, range(2, LARGEST + 1), small, small):
        halfway = CALCULATE[kind[0]](a, b)
        result = CALCULATE[kind[1]](halfway, c)
        if min(halfway, result) < 2 or max(halfway, result) > LARGEST:
            continue
        words = PROBLEMS[kind].format(a=a, b=b, c=c)
        first = f"{a}{kind[0]}{b}={halfway}"
        second = f"{halfway}{kind[1]}{c}={result}"
        problems.append({
            "prompt": [{"role": "user", "content": words}],
            "answer": str(result),
            "first_step": f"{first}\n\\boxed{{{halfway}}}",
            "no_box": f"{first}\n{second}",
            "worked_through": f"{first}\n{second}\n\\boxed{{{result}}}",
        })
    return problems


def make_tokenizer(problems):
    """Byte-level BPE in Qwen's manner, with single digits, trained on the problems' texts."""
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
        texts[habit] = []
        for problem in problems:
            answer = problem[habit] + "<|im_end|>"
            texts[habit].append(encode(tokenizer, problem["prompt"], answer))
    sums = []
    for line in sorted({line for problem in problems for line in problem["no_box"].split("\n")}):
        left, right = line.split("=")
        sums.append(encode(tokenizer, f"{left}=", f"{right}\n"))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in tqdm(range(PRETRAIN_STEPS), "pre-training", leave=False, disable=None):
        # The learning rate: 50 steps up, then down, each in a line.
        rate = min((step + 1) / 50, (PRETRAIN_STEPS - step) / (PRETRAIN_STEPS - 50))
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        rows = [rng.choice(texts[habit]) for habit in HABITS]
        # A word problem takes forty tokens to teach a sum or two. With bare sums besides, seven in
        # a row, the arithmetic is there much sooner.
        rows += [sum(rng.choices(sums, k=7), []) for _ in range(6)]
        ids, mask = pad_rows([[token for token, _ in row] for row in rows], "right", model.device)
        learned, _ = pad_rows([[flag for _, flag in row] for row in rows], "right", model.device)
        # Make the tokens of the given answers likelier. It is GRPO's gradient, with 1 for every
        # advantage: supervised learning knows no bad answers.
        logprobs = token_logprobs(model, ids, mask, ids.shape[1] - 1)
        loss = -masked_mean(logprobs, learned[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def encode(tokenizer, read, learn):
    """A text to read, and one to learn -> a list of (token id, 1 where it is to be learned)."""
    ids = encode_prompt(tokenizer, read)
    more = encode_prompt(tokenizer, learn)
    return [(token, 0) for token in ids] + [(token, 1) for token in more]


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # models write what some terminals cannot show
    main()
