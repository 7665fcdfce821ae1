# SPDX-License-Identifier: MIT-0
"""Train Qwen2.5-0.5B-Instruct on GSM8K with GRPO, on one GPU.

    python gsm8k_demo.py                       the real thing; without a CUDA GPU, the rehearsal
    python gsm8k_demo.py --rehearsal           a tiny model on the CPU, about a minute, offline
    python gsm8k_demo.py --random_weights      what will it cost on my card? nothing is learned
    python gsm8k_demo.py --output DIR --resume go on with a run that was interrupted
    python gsm8k_demo.py --help                every knob

The training itself is grpo.py's. Here is what stands around it: first the real run with its data,
prompt, reward, evaluation and model; then what is kept and shown meanwhile; then the rehearsal, a
tiny world in which all of it can be watched; and last the measuring with random weights.

All weights are trained. LoRA would save memory (Adam's and the gradients' share, not the
activations'), for another library and another set of knobs: peft has it, and TRL runs GRPO with
it.
"""

import argparse
import copy
import itertools
import json
import math
import random
import re
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from operator import add, mul, sub
from pathlib import Path
from typing import Callable, Optional

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig,
                          HfArgumentParser, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM)

from grpo import (GRPOConfig, MAY_CHANGE, check_examples, computes_in_bf16, extract_boxed, knob,
                  load_weights, read_metrics, rule_reward, sample_groups, token_logprobs,
                  training_steps, within_memory)

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
    random_weights: bool = knob(False, "true shapes, random weights: measures, learns nothing")
    output: Optional[str] = knob(None, "folder of the run; default: a new one in runs/")
    resume: bool = knob(False, "go on from the last checkpoint in --output")
    eval_questions: Optional[int] = knob(None, "test questions to evaluate on; default: all")
    eval_every: int = knob(0, "evaluate every so many steps too, and keep the best model")
    show_steps: int = knob(10, "show one group of answers every so many steps; 0: never")


# ------------------------------------------------------------------------------------------------
# Data and reward
# ------------------------------------------------------------------------------------------------


def make_prompt(question):
    """The chat in which the model is asked a question."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def gsm8k_example(row):
    """One row of GSM8K, {"question", "answer"} or that as a line of JSON -> an example."""
    if isinstance(row, str):
        row = json.loads(row)
    question = row["question"].strip()
    solution, _, answer = row["answer"].rpartition("####")  # it ends in "#### 1,234"
    solution = solution.strip()
    answer = answer.strip()
    if not (question and solution and answer):
        raise ValueError("no question, or no answer after '####'")
    return {"prompt": make_prompt(question), "answer": answer, "solution": solution}


def load_gsm8k(folder=None):
    """GSM8K, from a folder with its train.jsonl and test.jsonl, or else from the hub.

    Returns [train, test], datasets with the columns prompt (a chat), answer ("72") and solution.
    OSError where there is nothing to load, ValueError for a broken row.
    """
    source = folder or "openai/gsm8k"
    parts = []
    for part in ("train", "test"):
        try:
            if folder:
                with open(Path(folder, f"{part}.jsonl"), encoding="utf-8") as file:
                    rows = file.readlines()
            else:
                rows = load_dataset(source, "main", split=part)
        except Exception as error:
            raise OSError(f"cannot load {source} ({error}). Without a network: --rehearsal, or "
                          "--data and a folder with GSM8K's train.jsonl and test.jsonl") from error
        examples = []
        for place, row in enumerate(rows, 1):
            try:
                examples.append(gsm8k_example(row))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                where = f"{source}, {part}, line {place}"
                raise ValueError(f"{where}: {error!r} in {row!r:.80}") from error
        parts.append(Dataset.from_list(examples))
    return parts


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


# ------------------------------------------------------------------------------------------------
# Evaluation
# ------------------------------------------------------------------------------------------------


def wilson(right, total):
    """Wilson's 95 % interval [low, high] of a share: honest near 0 and 1 and for few questions."""
    if total == 0:
        return [0.0, 1.0]
    share = right / total
    z2 = 1.96**2 / total
    middle = share + z2 / 2
    half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4)
    return [max(0.0, middle - half) / (1 + z2), (middle + half) / (1 + z2)]


def is_right(text, answer, lenient=False):
    """Strict: the last box holds the answer. Lenient: if nothing is boxed, the last number."""
    if lenient and rule_reward(text, answer) == 0.0:
        # A minus between two digits, as in "5-7", is no sign.
        numbers = re.findall(r"(?:(?<![0-9])-)?\$?[0-9][0-9,]*(?:\.[0-9]+)?", text)
        last = numbers[-1].rstrip(",") if numbers else ""
        text = f"\\boxed{{{last}}}"
    return rule_reward(text, answer) == 1.5


def evaluate(model, tokenizer, dataset, max_completion_length=512, batch_size=256, sampled=False):
    """Accuracy of greedy answers to a dataset with the columns `prompt` and `answer`.

    `sampled` adds the accuracy at temperature 1, one answer to each question: greedy accuracy
    alone flatters, since it also rises when a model merely becomes surer of what it did most
    often before. The training's random numbers are not touched. Where memory is short, fewer
    than `batch_size` are answered at once. Returns the dict that stands in results.json.
    """
    examples = list(dataset)
    prompts = [example["prompt"] for example in examples]
    answers = [example["answer"] for example in examples]
    total = max(len(examples), 1)
    at_once = {"prompts": min(batch_size, total)}

    def answer_all(temperature):
        def work(count):
            texts = []
            for start in tqdm(range(0, len(prompts), count), "evaluating", leave=False):
                texts += sample_groups(model, tokenizer, prompts[start : start + count], 1,
                                       max_completion_length=max_completion_length,
                                       temperature=temperature).texts
            return texts

        torch.default_generator.manual_seed(0)
        return within_memory(work, at_once, "prompts")

    with torch.random.fork_rng(devices=[]):
        texts = answer_all(temperature=0)
        samples = answer_all(temperature=1.0) if sampled else []
    right = sum(map(is_right, texts, answers))
    lenient = sum(is_right(text, answer, lenient=True) for text, answer in zip(texts, answers))
    result = {"questions": len(examples), "accuracy": right / total,
              "interval": wilson(right, len(examples)), "lenient_accuracy": lenient / total,
              "examples": texts[:3]}
    if sampled:
        result["sampled_accuracy"] = sum(map(is_right, samples, answers)) / total
    return result


# ------------------------------------------------------------------------------------------------
# The real world: a model from the hub, GSM8K, the rule
# ------------------------------------------------------------------------------------------------


@dataclass
class World:
    """What is trained, on what, and how it is graded. `run` treats all worlds alike."""

    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerFast
    train_data: Dataset  # with the columns prompt and answer
    test_data: Dataset  # or a list of its examples
    reward: Callable  # a reward function, as `train` takes one
    watch: Callable  # texts of a step -> {name: share of them}; drawn as curves in the end
    last_words: str  # printed at the very end
    sampled: bool = False  # evaluate at temperature 1 as well
    keep_model: bool = True  # save what was trained


def load_model(name, random_weights=False, bf16=None):
    """Returns (model, tokenizer) of that name, or in that folder, on the GPU if there is one.

    `bf16` is the setting of the training to come; None: where the GPU can. OSError if they cannot
    be loaded, ValueError if there is no chat template.
    """
    device = "cpu"
    if torch.backends.mps.is_available():
        device = "mps"
    if torch.cuda.is_available():
        device = "cuda"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        if random_weights:
            config = AutoConfig.from_pretrained(name)
            torch.manual_seed(0)  # the same weights when the run is resumed
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with suppress(OSError):  # where there is such a file, some end tokens stand only there
                model.generation_config = GenerationConfig.from_pretrained(name)
        else:
            # Where the training will be in bfloat16, the checkpoint's own precision, so that the
            # model is evaluated as it will be trained. Safetensors only: to load the older format
            # is to run whatever it holds.
            if bf16 is None:
                bf16 = computes_in_bf16(torch.empty(0, device=device))
            dtype = "auto" if bf16 else torch.float32
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise OSError(f"cannot load {name}: {error}\nIs the network there, and the name right? A "
                      "local folder works offline; --rehearsal needs nothing at all") from error
    if tokenizer.chat_template is None:
        raise ValueError(f"{name} has no chat template; take an instruct model, like {MODEL}")
    return model.to(device), tokenizer


def save_model(model, tokenizer, folder):
    """In the Hugging Face format, generation settings included, in the model's own precision."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def share_boxed(texts):
    """How many of the answers have a box, right or wrong: the first thing that is learned."""
    return {"boxed": sum(extract_boxed(text) is not None for text in texts) / len(texts)}


def real_world(config, demo):
    """The model that --model names, and GSM8K."""
    train_data, test_data = load_gsm8k(demo.data)
    model, tokenizer = load_model(demo.model, bf16=config.bf16)
    last_words = CHAT.format(output=demo.output, system=SYSTEM_PROMPT)
    return World(model, tokenizer, train_data, test_data, boxed_reward, share_boxed, last_words)


# ------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------


def run(world, config, demo, folder):
    """Check, evaluate, train, evaluate, save. Returns what results.json holds."""
    check(world, config)
    if demo.resume:
        judge_checkpoint(world, config, demo, folder)
    else:
        begin_folder(config, demo, folder)
        judge(world, config, demo, folder, step=0)
    shares = []
    for metrics, learner in training_steps(world.model, world.tokenizer, world.train_data,
                                           world.reward, config, folder.path, demo.resume):
        step = metrics["step"]
        shares.append(world.watch(learner.rollout.texts))
        if len(shares) == 1:
            show_time_to_go(metrics, config, demo, folder)
        if demo.show_steps and (step == 1 or is_due(step, demo.show_steps)):
            group = pick_group(learner)
            show_group(group, metrics)
            keep_sample(folder, step, group)
        if is_due(step, demo.eval_every) and step < config.steps:
            judge(world, config, demo, folder, step)
        write_results(folder)  # the seconds so far, should this be the last step
    history = read_metrics(folder.path)
    if len(history) < config.steps:
        advice = f"what was saved goes on with --resume --output {folder.path}"
        if config.save_steps == 0:
            advice = "nothing was saved, since save_steps is 0"
        print(f"stopped after step {len(history)}; {advice}")
        return folder.results
    if world.keep_model:
        # Before its evaluation, in which something may go wrong.
        save_model(world.model, world.tokenizer, folder.path)
    judge(world, config, demo, folder, step=config.steps)
    show_end(world, folder, history, shares)
    return folder.results


def is_due(step, every):
    """Whether something comes round at this step that comes every so many steps; 0: never."""
    return every > 0 and step % every == 0


def check(world, config):
    """Seconds before hours: is the reward right on right answers, do sampler and scorer agree?"""
    model = world.model
    examples = list(world.train_data)
    check_examples(examples, model, world.tokenizer, config)
    for example in examples:
        solved = f"{example.get('solution', '')} \\boxed{{{example['answer']}}}"
        reward = rule_reward(solved, example["answer"])
        if reward != 1.5:
            raise ValueError(f"this reference solution earns {reward} instead of 1.5: {solved!r}")
    prompts = [example["prompt"] for example in examples[:2]]
    rollout = sample_groups(model, world.tokenizer, prompts, 2, max_completion_length=32,
                            temperature=config.temperature)
    length = rollout.logprobs.shape[1]
    with torch.no_grad():
        scored = token_logprobs(model, rollout.input_ids, rollout.attention_mask, length,
                                config.temperature)
    gap = (scored - rollout.logprobs)[rollout.completion_mask].abs().mean().item()
    print(f"{model.num_parameters() / 1e6:.1f} M parameters on {model.device}, {len(examples)} "
          f"questions to learn from, {len(world.test_data)} to be tested on")
    print("checks: all reference solutions earn 1.5; sampler and scorer are "
          f"{gap:.1e} nats apart")
    if gap > 0.1:
        raise ValueError(f"{gap:.3f} nats are too much, the ratio would be noise: does this model "
                         "take other masks or positions than grpo.py gives it?")


def judge(world, config, demo, folder, step):
    """Evaluate the model as it is after `step`, unless results.json has that already."""
    name = {0: "before", config.steps: "after"}.get(step, f"step {step}")
    if name in folder.results:
        return
    started = time.perf_counter()
    result = evaluate(world.model, world.tokenizer, world.test_data,
                      config.max_completion_length, sampled=world.sampled)
    folder.results[name] = result
    folder.results["evaluation_seconds"] = time.perf_counter() - started
    best = folder.results.get("best", {"accuracy": -1})
    wanted = demo.eval_every and step > 0 and world.keep_model and world.test_data
    if wanted and result["accuracy"] > best["accuracy"]:
        save_model(world.model, world.tokenizer, folder.path / "best")
        # The best of many tries at the same questions owes something to luck: it says so.
        folder.results["best"] = {"step": step, "chosen": "on these questions", **result}
    write_results(folder)
    if world.test_data:
        tqdm.write(show_result(name, result))
    for example, text in zip(world.test_data, result["examples"]):
        reward = rule_reward(text, example["answer"])
        keep_sample(folder, step, {**example, "completions": [text], "rewards": [reward]})


def judge_checkpoint(world, config, demo, folder):
    """Make up for an evaluation that was due when the checkpoint was saved, and did not end.

    The training goes on at once from there, so a copy of the model gets the saved weights.
    """
    if demo.eval_every == 0:
        return
    model = copy.deepcopy(world.model)
    step = load_weights(folder.path, model)
    if is_due(step, demo.eval_every) and step < config.steps:
        judge(replace(world, model=model), config, demo, folder, step)


# ------------------------------------------------------------------------------------------------
# What is kept, and what is shown
# ------------------------------------------------------------------------------------------------


@dataclass
class Folder:
    """Where a run lives: grpo.py writes its checkpoint and metrics.jsonl, the rest is ours."""

    path: Path
    results: dict  # the contents of results.json
    started: float  # by time.perf_counter, as if the run had never been interrupted


def open_folder(demo):
    """The folder of a new run, or of one to resume. Writes nothing. ValueError if another run is
    there."""
    path = Path(demo.output)
    if demo.resume:
        results = json.loads((path / "results.json").read_text(encoding="utf-8"))
        return Folder(path, results, time.perf_counter() - results["seconds"])
    metrics = path / "metrics.jsonl"
    begun = metrics.exists() and metrics.stat().st_size > 0
    if begun or (path / "checkpoint.safetensors").exists():
        raise ValueError(f"{path} holds a run: --resume goes on from its checkpoint, if it came "
                         "that far. Or name another --output, or delete that folder")
    if demo.model and path.resolve() == Path(demo.model).resolve():
        raise ValueError(f"--output is {path}, and so is --model: it would be overwritten")
    return Folder(path, {}, time.perf_counter())


def begin_folder(config, demo, folder):
    """Keep the settings of a new run, when everything has been checked."""
    folder.path.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(asdict(config) | asdict(demo), indent=2)
    (folder.path / "settings.json").write_text(settings, encoding="utf-8")
    (folder.path / "samples.jsonl").write_text("", encoding="utf-8")


def read_settings(output):
    """The settings of the run in this folder. ValueError if there is none to go on with."""
    if not Path(output, "checkpoint.safetensors").exists():
        raise ValueError(f"no checkpoint to resume from in {output}: is it the right folder? A run "
                         "that ended before its first checkpoint has to begin anew, in another")
    return json.loads(Path(output, "settings.json").read_text(encoding="utf-8"))


def write_results(folder):
    """Write results.json, beside the old one first, so that there is always a whole one."""
    folder.results["seconds"] = round(time.perf_counter() - folder.started, 1)
    new = folder.path / "results.json.new"
    new.write_text(json.dumps(folder.results, indent=2), encoding="utf-8")
    new.replace(folder.path / "results.json")


def keep_sample(folder, step, group):
    """Add a question with its answers and their rewards to samples.jsonl. What is done again
    after a resume stands there twice."""
    with open(folder.path / "samples.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **group}) + "\n")


def show_time_to_go(metrics, config, demo, folder):
    """After the first step: how long the others will take."""
    seconds = sum(metrics[f"{part}_seconds"] for part in ("sample", "score", "update"))
    left = config.steps - metrics["step"]
    evaluation = folder.results["evaluation_seconds"]
    if demo.eval_every:
        evaluation *= 1 + left // demo.eval_every
    tqdm.write(f"to go, in h:mm:ss: about {timedelta(seconds=round(seconds * left))} of training, "
               f"and {timedelta(seconds=round(evaluation))} of evaluation")


def pick_group(learner):
    """The step's first group that teaches something, else the first, as a dict."""
    teaches = (learner.advantages != 0).any(dim=1).tolist()
    g = teaches.index(True) if True in teaches else 0
    G = learner.rewards.shape[1]
    return {**learner.examples[g], "completions": learner.rollout.texts[g * G : (g + 1) * G],
            "rewards": learner.rewards[g].tolist(), "advantages": learner.advantages[g].tolist()}


def show_group(group, metrics):
    """Print a question with its group of answers, best first, and the step's figures in words."""
    question = group["prompt"][-1]["content"]
    tqdm.write(f"\nstep {metrics['step']}: {question[:300]}  (answer {group['answer']})")
    answers = zip(group["rewards"], group["advantages"], group["completions"])
    for reward, advantage, text in sorted(answers, reverse=True):
        text = " ".join(text.split())
        if len(text) > 150:
            text = f"{text[:60]} ... {text[-85:]}"
        tqdm.write(f"  reward {reward:.1f}  advantage {advantage:+.2f}  {text}")
    tqdm.write("  in this step: mean reward {reward_mean:.2f}; {truncated_fraction:.0%} of the "
               "answers were cut off;\n  in {zero_variance_fraction:.0%} of the groups all earned "
               "the same: these teach nothing".format(**metrics))
    if metrics["kl"] > 0:  # unknown at beta = 0, where there is no reference
        tqdm.write("  the model has moved {kl:.4f} nats a token from where it began (KL)"
                   .format(**metrics))
    tqdm.write("  sampling {sample_seconds:.2f} s, scoring {score_seconds:.2f} s, update "
               "{update_seconds:.2f} s; {tokens_per_second:.0f} tokens a second; at most "
               "{peak:.2f} GB of memory".format(**metrics, peak=peak_memory()))
    if metrics["truncated_fraction"] == 1:
        tqdm.write("  warning: what is cut off earns nothing: a larger --max_completion_length?")
    if metrics["zero_variance_fraction"] == 1:
        tqdm.write("  warning: nothing to learn in this step. If that goes on: are the questions "
                   "too hard,\n  or too easy, or the answers never boxed? samples.jsonl has some")


def peak_memory():
    """GB held at most so far: on a CUDA GPU by tensors, elsewhere by the process; nan: unknown."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return torch.cuda.max_memory_allocated() / 1e9
    if sys.platform == "win32":
        return math.nan
    import resource  # Windows does not have it
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return peak * unit / 1e9


def show_result(name, result):
    """An evaluation as one line of text."""
    low, high = result["interval"]
    line = (f"{name:>9}: {result['accuracy']:.1%} of {result['questions']} right (95 %: {low:.1%} "
            f"to {high:.1%}), {result['lenient_accuracy']:.1%} if unboxed numbers count")
    if "sampled_accuracy" in result:
        line += f", {result['sampled_accuracy']:.1%} sampled"
    if "chosen" in result:
        line += f" (step {result['step']}, chosen {result['chosen']})"
    return line


def sparkline(values, width=60):
    """A curve in one line of text, from its lowest value to its highest."""
    low = min(values)
    span = max(values) - low + 1e-9
    bars = ""
    for value in values[:: math.ceil(len(values) / width)]:
        bars += "▁▂▃▄▅▆▇█"[int(7.99 * (value - low) / span)]
    return f"{bars}  {values[0]:.2f} -> {values[-1]:.2f}"


def show_end(world, folder, history, shares):
    """The same questions before and after, the curves, what came out, and what it took."""
    results = folder.results
    examples = zip(world.test_data, results["before"]["examples"], results["after"]["examples"])
    for example, before, after in examples:
        print(f"\n{example['prompt'][-1]['content']}  (answer {example['answer']})")
        for when, text in (("before", before), ("after", after)):
            print(f"{when:>8}: " + text.strip().replace("\n", "\n          "))
    print(f"\nsteps 1 to {len(history)}, each curve from its lowest value to its highest:")
    for name, key in (("reward", "reward_mean"), ("tokens", "completion_length")):
        print(f"{name:>14} {sparkline([metrics[key] for metrics in history])}")
    if shares:  # of the steps since the start or the last resume
        print(f"steps {len(history) - len(shares) + 1} to {len(history)}, shares of the answers:")
        for name in shares[0]:
            print(f"{name:>14} {sparkline([share[name] for share in shares])}")
    print()
    for name in ("before", "best", "after"):
        if name in results and world.test_data:
            print(show_result(name, results[name]))
    print(f"{results['seconds']:.0f} s in all; everything is in {folder.path}\n{world.last_words}")


# ------------------------------------------------------------------------------------------------
# The rehearsal: a tiny world in which GRPO can be watched from start to end on a CPU, offline
#
# A language model has to be there before it can be reinforced, so one is made in seconds: a Qwen2
# with a quarter of a million weights and a tokenizer of its own, pre-trained on made-up word
# problems of two steps. It learns the arithmetic well, and from its texts a bad habit with it:
# most of them stop after the first step and box that. GRPO's job is the habit, not the
# arithmetic: it can only make likelier what the model already does now and then.
# ------------------------------------------------------------------------------------------------

HONEST = """What this shows: by its rewards alone, GRPO found the habit that works, and made it
the rule. What it does not show: that it taught arithmetic. The tiny model could do the sums
before; its low start was made, by texts most of which stop halfway."""
# Flags that the rehearsal sets, unless they are typed. A small model takes a large learning rate.
REHEARSAL = dict(steps=40, prompts_per_step=16, max_completion_length=28, learning_rate=5e-4,
                 warmup_steps=5, beta=0.02, eval_questions=256)
# The operations of a problem's two steps -> its words.
PROBLEMS = {
    "*+": "{name} buys {a} bags of {b} {things}, then {c} more. How many?",
    "*-": "{name} buys {a} bags of {b} {things}, then loses {c}. How many?",
    "+*": "{name} puts {a} red and {b} blue {things} in each of {c} bags. How many?",
    "+-": "{name} has {a} {things}, finds {b}, loses {c}. How many?",
    "++": "{name} has {a} {things}, finds {b}, then {c} more. How many?",
    "-+": "{name} has {a} {things}, loses {b}, finds {c}. How many?",
}
NAMES = ["Anna", "Ben", "Cara", "Dan"]
THINGS = ["pens", "eggs", "cards", "coins"]
LARGEST = 20  # number to occur: the fewer the sums, the sooner they are learned

# How the texts of one pre-training step answer: so many of each in every step, not drawn, so that
# the bad habit leads by the same margin, and greedy answers show it, whatever the seed.
HABITS = ["first step"] * 10 + ["no box"] * 2 + ["worked through"] * 4
DRILLS_PER_STEP = 6
PRETRAIN_STEPS = 600
PRETRAIN_LR = 3e-3

# Qwen's, without its system prompt: here that would be tokens that say nothing.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def solve(kind, a, b, c):
    """Both steps of a problem, each as (number, operation, number, result)."""
    calculate = {"+": add, "-": sub, "*": mul}
    halfway = calculate[kind[0]](a, b)
    result = calculate[kind[1]](halfway, c)
    return (a, kind[0], b, halfway), (halfway, kind[1], c, result)


def all_problems():
    """Every (kind, a, b, c) whose results are from 2 to LARGEST."""
    problems = []
    for problem in itertools.product(PROBLEMS, range(2, LARGEST + 1), range(2, 8), range(2, 8)):
        if all(2 <= step[-1] <= LARGEST for step in solve(*problem)):
            problems.append(problem)
    return problems


def as_chat(problem, rng):
    """The problem in words, as a chat."""
    kind, a, b, c = problem
    name = rng.choice(NAMES)
    things = rng.choice(THINGS)
    words = PROBLEMS[kind].format(name=name, things=things, a=a, b=b, c=c)
    return [{"role": "user", "content": words}]


def answer_in_habit(problem, name):
    """What the model is pre-trained to answer."""
    first, second = solve(*problem)
    first_line = "%d%s%d=%d\n" % first
    second_line = "%d%s%d=%d\n" % second
    if name == "first step":
        return first_line + "\\boxed{%d}" % first[-1]
    if name == "no box":
        return first_line + second_line.rstrip()
    return first_line + second_line + "\\boxed{%d}" % second[-1]


def habit(text):
    """Which habit an answer shows; whether its numbers are right does not matter here."""
    steps = text.count("=")
    boxed = text.rstrip().endswith("}")
    names = {(1, True): "first step", (2, False): "no box", (2, True): "worked through"}
    return names.get((steps, boxed), "other")


def share_habits(texts):
    """How many of the answers show which habit."""
    found = [habit(text) for text in texts]
    names = ("first step", "no box", "worked through", "other")
    return {name: found.count(name) / len(found) for name in names}


def make_tokenizer(texts):
    """Byte-level BPE in Qwen's manner, with single digits, trained on `texts`."""
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


def make_model(tokenizer, seed):
    """A Qwen2 of a quarter of a million random weights."""
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
        # Qwen2's defaults, 1e4 and 0.02, learn far more slowly at this size.
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, initializer_range=0.08,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=end, pad_token_id=pad)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs as well
        model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [end, pad]
    return model


def encode(tokenizer, pairs):
    """Pairs of texts, one to be read and one to be learned -> ids, and which are learned."""
    ids = []
    learned = []
    for read, answer in pairs:
        for text, is_learned in ((read, False), (answer, True)):
            tokens = tokenizer.backend_tokenizer.encode(text).ids
            ids += tokens
            learned += [is_learned] * len(tokens)
    return torch.tensor(ids), torch.tensor(learned)


def pretraining_texts(tokenizer, problems, sums, rng):
    """The texts of one step, encoded: problems in all habits, and rows of bare sums."""
    texts = []
    for name in HABITS:
        problem = rng.choice(problems)
        question = tokenizer.apply_chat_template(
            as_chat(problem, rng), tokenize=False, add_generation_prompt=True)
        answer = answer_in_habit(problem, name) + "<|im_end|>"
        texts.append(encode(tokenizer, [(question, answer)]))
    # A word problem takes forty tokens to teach one sum or two; with bare sums besides, six in a
    # row, the arithmetic is there much sooner.
    for _ in range(DRILLS_PER_STEP):
        drawn = rng.choices(sums, k=6)
        pairs = [("%d%s%d=" % s[:3], "%d\n" % s[3]) for s in drawn]
        texts.append(encode(tokenizer, pairs))
    return texts


def pretrain(model, tokenizer, problems, rng):
    """Teach the tiny model its arithmetic and its habits. Changes it in place."""
    sums = set()
    for problem in problems:
        sums.update(solve(*problem))
    sums = sorted(sums)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in tqdm(range(PRETRAIN_STEPS), "pre-training", leave=False, disable=None):
        # 50 steps up, then linearly down to 0.
        rate = min((step + 1) / 50, (PRETRAIN_STEPS - step) / (PRETRAIN_STEPS - 50))
        optimizer.param_groups[0]["lr"] = PRETRAIN_LR * rate
        ids, learned = zip(*pretraining_texts(tokenizer, problems, sums, rng))
        # Padded on the right, a causal model needs no attention mask: no token looks that way.
        ids = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
        learned = pad_sequence(learned, batch_first=True)
        states = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        # Logits only where the next token is one to learn: the answers, not the questions.
        logits = model.lm_head(states[learned[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][learned[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def as_dataset(problems, rng):
    """Problems as a dataset with the columns prompt and answer."""
    examples = []
    for problem in problems:
        first, second = solve(*problem)
        examples.append({"prompt": as_chat(problem, rng), "answer": str(second[-1])})
    return Dataset.from_list(examples)


def rehearsal(seed):
    """Returns (model, tokenizer, train_dataset, test_dataset): the tiny world, pre-trained.

    A fifth of the problems is held out for the test, three tenths are for GRPO, half for the
    pre-training. The same seed gives the same weights; global random numbers are neither used nor
    disturbed.
    """
    rng = random.Random(seed)
    problems = all_problems()
    rng.shuffle(problems)
    n = len(problems)
    known = problems[n // 2 :]
    questions = [as_chat(problem, rng)[0]["content"] for problem in known]
    answers = [answer_in_habit(problem, "worked through") for problem in known]
    tokenizer = make_tokenizer(["user", "assistant"] * 99 + questions + answers)
    model = make_model(tokenizer, seed)
    pretrain(model, tokenizer, known, rng)
    train_data = as_dataset(problems[n // 5 : n // 2], rng)
    test_data = as_dataset(problems[: n // 5], rng)
    return model.eval(), tokenizer, train_data, test_data


def rehearsal_world(config):
    """The tiny model and its problems, graded by the same rule as the real ones."""
    torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up
    started = time.perf_counter()
    model, tokenizer, train_data, test_data = rehearsal(config.seed)
    print(f"a tiny model, made and pre-trained in {time.perf_counter() - started:.0f} s")
    return World(model, tokenizer, train_data, test_data, boxed_reward, share_habits, HONEST,
                 sampled=True)


# ------------------------------------------------------------------------------------------------
# Measuring: true shapes, random weights
#
# What does a step take on this card, before any weights are downloaded? Random weights end an
# answer about once in 150,000 tokens, so a bias on the end token makes the lengths realistic. And
# they never earn a reward, so rewards are drawn.
# ------------------------------------------------------------------------------------------------

# Flags that --random_weights sets, unless they are typed.
MEASURING = dict(steps=5, show_steps=1, save_steps=0, eval_questions=0)
MEASURED = """Nothing was learned: weights and rewards were random, and the end token was made so
likely that answers have a realistic length. What each step took stands above."""


def random_reward(prompts, completions, **columns):
    """Rewards that mean nothing: the work of a step, without the lesson."""
    return [random.choice((0.0, 0.5, 1.5)) for _ in completions]


def random_world(config, demo):
    """GSM8K, and a model of the true shape whose weights are random."""
    print("random weights and random rewards: this measures, and learns nothing")
    train_data, test_data = load_gsm8k(demo.data)
    model, tokenizer = load_model(demo.model, random_weights=True)
    head = model.get_output_embeddings()
    some_ids = torch.arange(48, device=model.device).unsqueeze(0)
    with torch.no_grad():
        level = model(some_ids).logits.logsumexp(dim=-1).mean()  # log of the sum of all exp(logit)
    # One token in 0.74 * 512 an end token: a mean of 280 tokens under a cap of 512.
    bias = torch.zeros(head.out_features, device=model.device)
    bias[tokenizer.eos_token_id] = level - math.log(0.74 * config.max_completion_length)
    head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return World(model, tokenizer, train_data, test_data, random_reward, share_boxed, MEASURED,
                 keep_model=False)


# ------------------------------------------------------------------------------------------------
# From the command line
# ------------------------------------------------------------------------------------------------


def read_flags():
    """Returns (GRPOConfig, DemoConfig): what was typed, and for the rest the world's defaults, or
    the settings of the run that is resumed."""
    parser = HfArgumentParser((GRPOConfig, DemoConfig), description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    _, demo, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        raise ValueError(f"there is no {' '.join(unknown)}; --help lists all flags")
    # What was typed still wins over these defaults when the flags are read again.
    saved = {}
    rehearsal = False
    if demo.resume:
        if not demo.output:
            raise ValueError("--resume needs --output: which run?")
        saved = read_settings(demo.output)
        parser.set_defaults(**saved)
    elif demo.rehearsal or is_rehearsal_by_default(demo):
        rehearsal = True
        parser.set_defaults(**REHEARSAL)
    elif demo.random_weights:
        parser.set_defaults(**MEASURING)
    config, demo = parser.parse_args_into_dataclasses()
    demo.rehearsal = demo.rehearsal or rehearsal
    settings = asdict(config) | asdict(demo)
    for name, value in saved.items():
        may_change = name in ("output", "resume", "show_steps", *MAY_CHANGE)
        if settings[name] != value and not may_change:
            raise ValueError(f"a resumed run keeps its settings: there {name} is {value}, here "
                             f"{settings[name]}")
    for name in ("eval_questions", "eval_every", "show_steps"):
        if (settings[name] or 0) < 0:
            raise ValueError(f"{name} is {settings[name]}, and must be at least 0")
    if demo.rehearsal and (demo.random_weights or demo.model or demo.data):
        raise ValueError("the rehearsal has a model and data of its own: leave out --model, --data "
                         "and --random_weights")
    if not demo.rehearsal:
        demo.model = demo.model or MODEL
    demo.output = demo.output or time.strftime("runs/%Y%m%d-%H%M%S")
    return config, demo


def is_rehearsal_by_default(demo):
    """Where there is no CUDA GPU, the bare command is the rehearsal, and says so."""
    if demo.random_weights or demo.model or demo.data or torch.cuda.is_available():
        return False
    print("no CUDA GPU here, so this is the rehearsal: a tiny model that learns on the CPU. "
          f"The real thing, which is far too much for a CPU: --model {MODEL}")
    return True


def is_ours(error):
    """Whether a line of these two files raised the error, or a file could not be read or written;
    then its words are all one needs."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).name in ("grpo.py", "gsm8k_demo.py")
    return ours or isinstance(error, OSError) and error.filename is not None


def main():
    """Choose a world, and run it. An error of ours ends in one clear line."""
    if sys.platform == "win32" and torch.cuda.is_available():
        # Drivers there may spill into the system's memory, and crawl, where others fail.
        torch.cuda.set_per_process_memory_fraction(0.95)
    try:
        config, demo = read_flags()
        folder = open_folder(demo)
        if demo.rehearsal:
            world = rehearsal_world(config)
        elif demo.random_weights:
            world = random_world(config, demo)
        else:
            world = real_world(config, demo)
        world.test_data = list(world.test_data)[: demo.eval_questions]
        run(world, config, demo, folder)
    except (ValueError, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        if not is_ours(error):
            raise
        sys.exit(f"\nstopped: {error}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # models write what some terminals cannot show
    main()
