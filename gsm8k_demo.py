# SPDX-License-Identifier: MIT-0
"""Train Qwen2.5-0.5B-Instruct on GSM8K with GRPO, on one GPU, in an evening.

    python gsm8k_demo.py                       the real thing; without a GPU, the rehearsal
    python gsm8k_demo.py --rehearsal           a tiny model on the CPU, about a minute, offline
    python gsm8k_demo.py --random_weights      what will it cost on my card? nothing is learned
    python gsm8k_demo.py --output DIR --resume go on with a run that was interrupted
    python gsm8k_demo.py --help                every knob

The training itself is grpo.py's; here is what stands around it: data, prompts, evaluation, checks
that cost seconds before hours are spent, and the rehearsal.

All weights are trained. LoRA would save memory (Adam's and the gradients' share, not the
activations'), for another library and another set of knobs: peft has it, and TRL runs GRPO with
it.
"""

import argparse, copy, json, math, os, random, re, sys, time  # noqa: E401
from dataclasses import asdict, dataclass
from itertools import product
from typing import Optional

import torch
import torch.nn.functional as F
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig,
                          HfArgumentParser, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM)

from grpo import (GRPOConfig, computes_in_bf16, knob, rule_reward, sample_groups, token_logprobs,
                  training_steps)

# The defaults of the real run are GRPOConfig's: 32 questions x 8 answers = 256 answers a step at
# learning rate 1e-6, 512 tokens, temperature 1, clip 0.2. Evidence: verl's baseline trains this
# model on this data at 1e-6 with 256 prompts a step (36 % -> 46 % after 39 steps, 53 % after 99,
# at most 58 %), and a scaling study takes Qwen3-0.6B from 41 % to 68 % in 56 steps at the same
# rate. Most of the gain comes early, so 300 steps are plenty. On a GPU, sampling 256 answers
# takes hardly longer than sampling 8, since each token waits for the launch of kernels and not
# for arithmetic. A cap of 512 tokens: at 256, more than half of this model's answers are cut off,
# and earn nothing.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SYSTEM_PROMPT = "Solve the problem step by step, and put only the final number into \\boxed{}."
CHAT = """chat with it:
    from transformers import pipeline
    chat = pipeline("text-generation", "{output}")
    messages = [{{"role": "system", "content": {system!r}}},
                {{"role": "user", "content": "Tom has 3 boxes of 12 eggs and drops 5. How many?"}}]
    print(chat(messages, max_new_tokens=512)[0]["generated_text"][-1]["content"])"""
MEASURING = dict(steps=5, show_steps=1, save_steps=0, eval_questions=0)  # --random_weights sets it


@dataclass
class DemoConfig:
    """What this script is to do; all else is GRPOConfig's."""

    model: Optional[str] = knob(None, "a causal LM with a chat template, or its folder")
    data: Optional[str] = knob(None, "a folder with train.jsonl and test.jsonl")
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


def boxed_reward(prompts, completions, answer, **columns):
    """`rule_reward` over a batch, as GRPO and TRL call it: completions as strings or as chats."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [rule_reward(text, right) for text, right in zip(texts, answer)]


def load_gsm8k(folder=None):
    """GSM8K as (train, test) with the columns prompt (a chat), answer ("72") and solution. From a
    folder with its train.jsonl and test.jsonl, else from the hub; ValueError for a broken row."""
    try:
        if folder:
            parts = [open(os.path.join(folder, f"{part}.jsonl"), encoding="utf-8").readlines()
                     for part in ("train", "test")]
        else:
            data = load_dataset("openai/gsm8k", "main")
            parts = [data["train"], data["test"]]
    except Exception as error:
        raise OSError(f"cannot load {folder or 'openai/gsm8k'} ({error}). Without a network "
                      "--rehearsal, or --data and a folder with GSM8K's train.jsonl and test.jsonl"
                      ) from error

    def prepare(place, row):
        try:
            row = json.loads(row) if isinstance(row, str) else row
            # GSM8K's solutions end in "#### 1,234".
            solution, _, answer = (text.strip() for text in row["answer"].rpartition("####"))
            chat = [{"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": row["question"].strip()}]
            if not (solution and answer and chat[1]["content"]):
                raise ValueError("no question, or no answer after '####'")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder or 'openai/gsm8k'}, line {place}: {error!r} in {row!r:.80}"
                             ) from error
        return {"prompt": chat, "answer": answer, "solution": solution}

    return [Dataset.from_list([prepare(*row) for row in enumerate(part, 1)]) for part in parts]


# ------------------------------------------------------------------------------------------------
# Evaluation
# ------------------------------------------------------------------------------------------------


def wilson(right, total):
    """Wilson's 95 % interval [low, high] of a share: honest near 0 and 1 and for few questions."""
    if total == 0:
        return [0.0, 1.0]
    share, z2 = right / total, 1.96**2 / total
    half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4)
    return [max(0.0, share + z2 / 2 - half) / (1 + z2), (share + z2 / 2 + half) / (1 + z2)]


def is_right(text, answer, lenient=False):
    """Strict: the last box holds the answer. Lenient: if nothing is boxed, the last number."""
    if lenient and rule_reward(text, answer) == 0.0:
        numbers = re.findall(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?", text)
        text = f"\\boxed{{{numbers[-1].rstrip(',')}}}" if numbers else ""
    return rule_reward(text, answer) == 1.5


def evaluate(model, tokenizer, dataset, max_completion_length=512, batch_size=256, sampled=False,
             temperature=0):
    """Accuracy on a data set with `prompt` and `answer` columns, greedy unless told otherwise.

    `sampled` adds the accuracy at temperature 1, one answer to each question: greedy accuracy
    alone flatters, since it also rises when a model merely becomes surer of what it did most
    often before. Whatever is drawn here does not touch the training's random numbers.
    """
    rows, texts, samples = list(dataset), [], []  # a list of dicts does as well
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for first in tqdm(range(0, len(rows), batch_size), "evaluating", leave=False):
            prompts = [row["prompt"] for row in rows[first : first + batch_size]]
            for t, kept in ((temperature, texts), (1.0, samples))[: 1 + sampled]:
                kept += sample_groups(model, tokenizer, prompts, 1, temperature=t,
                                      max_completion_length=max_completion_length).texts
    answers, total = [row["answer"] for row in rows], max(len(rows), 1)
    right = sum(map(is_right, texts, answers))
    lenient = sum(is_right(text, answer, lenient=True) for text, answer in zip(texts, answers))
    result = {"questions": len(texts), "accuracy": right / total,
              "interval": wilson(right, len(texts)), "lenient_accuracy": lenient / total,
              "examples": texts[:3]}
    if sampled:
        result["sampled_accuracy"] = sum(map(is_right, samples, answers)) / total
    return result


def say_result(name, result):
    """One line for a person."""
    low, high = result["interval"]
    line = (f"{name:>9}: {result['accuracy']:.1%} of {result['questions']} right (95 %: {low:.1%} "
            f"to {high:.1%}), {result['lenient_accuracy']:.1%} if unboxed numbers count")
    sampled = result.get("sampled_accuracy")
    return line if sampled is None else f"{line}, {sampled:.1%} sampled"


# ------------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------------


def load_model(name, random_weights=False, max_completion_length=512):
    """(model, tokenizer, dtype of the checkpoint), on the GPU if there is one."""
    mps = torch.backends.mps.is_available()
    device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        config = AutoConfig.from_pretrained(name)
        if random_weights:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            # On a bf16 card in the checkpoint's dtype, so that it is judged as it will be trained;
            # training makes its own float32 copies. Safetensors only: the older format runs code.
            dtype = "auto" if computes_in_bf16(torch.empty(0, device=device)) else torch.float32
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise OSError(f"cannot load {name}: {error}\nIs the network there, and the name right? A "
                      "local folder works offline; --rehearsal needs nothing at all") from error
    if tokenizer.chat_template is None:
        raise ValueError(f"{name} has no chat template; take an instruct model, like {MODEL}")
    model.to(device)
    if random_weights:
        # Its end tokens do not stand in config.json but in generation_config.json.
        model.generation_config = GenerationConfig.from_pretrained(name)
        # Random weights end an answer about once in 150,000 tokens. A bias on the end token makes
        # the lengths realistic: a mean of 280 tokens under a cap of 512, and likewise for others.
        head = model.get_output_embeddings()
        with torch.no_grad():
            level = model(torch.arange(48, device=device)[None]).logits.logsumexp(dim=-1).mean()
        bias = torch.zeros(head.out_features, device=device)
        bias[tokenizer.eos_token_id] = level - math.log(0.74 * max_completion_length)
        head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return model, tokenizer, config.dtype or torch.float32


def save_model(model, tokenizer, folder, dtype):
    """In the Hugging Face format and the checkpoint's own dtype, generation settings included."""
    rounded = model if model.dtype == dtype else copy.deepcopy(model).to(dtype)
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_reward(prompts, completions, **columns):
    """For random weights, which never earn anything: the work of a step, without the lesson."""
    return [random.choice((0.0, 0.5, 1.5)) for _ in completions]


def preflight(model, tokenizer, dataset, config):
    """Seconds before hours: is the reward right on right answers, do sampler and scorer agree?"""
    solved = [f"{row.get('solution', '')} \\boxed{{{row['answer']}}}" for row in dataset]
    for text, reward in zip(solved, boxed_reward(None, solved, dataset["answer"])):
        if reward != 1.5:
            raise ValueError(f"this reference solution earns {reward} instead of 1.5: {text!r}")
    with torch.no_grad():
        r = sample_groups(model, tokenizer, dataset[:2]["prompt"], 2, max_completion_length=32,
                          temperature=config.temperature)
        scored = token_logprobs(model, r.input_ids, r.attention_mask, r.logprobs.shape[1],
                                config.temperature, num_generations=2)
    gap = (scored - r.logprobs)[r.completion_mask].abs().mean().item()
    print(f"checks: {len(solved)} reference solutions earn 1.5; sampler and scorer are "
          f"{gap:.1e} nats apart")
    if gap > 0.1:
        raise ValueError(f"{gap:.3f} nats are too much, the ratio would be noise: does this model "
                         "take other masks or positions than grpo.py gives it?")


# ------------------------------------------------------------------------------------------------
# The rehearsal: a tiny world in which GRPO can be watched from start to end on a CPU, offline
#
# A language model has to be there before it can be reinforced, so one is made in seconds: a Qwen2
# with a quarter of a million weights and a tokenizer of its own, pre-trained on made-up word
# problems of two steps. It learns the arithmetic well, and from its texts a bad habit with it:
# most of them stop after the first step and box that. GRPO's job is the habit, not the
# arithmetic: it can only make likelier what the model already does now and then.
# ------------------------------------------------------------------------------------------------

HONEST = """What this shows: by its score alone, GRPO found the habit that works, and made it
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
DRILLS_PER_STEP, PRETRAIN_STEPS, PRETRAIN_LR = 6, 600, 3e-3

# Qwen's, without its system prompt: here that would be tokens that say nothing.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def solve(kind, a, b, c):
    """Both steps, each as (number, operation, number, result)."""
    calculate = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    first = calculate[kind[0]](a, b)
    return (a, kind[0], b, first), (first, kind[1], c, calculate[kind[1]](first, c))


def all_problems():
    """Every (kind, a, b, c) whose results are from 2 to LARGEST."""
    numbers = product(PROBLEMS, range(2, LARGEST + 1), range(2, 8), range(2, 8))
    return [p for p in numbers if all(2 <= step[-1] <= LARGEST for step in solve(*p))]


def as_chat(problem, rng):
    """The problem in words, as a chat."""
    kind, a, b, c = problem
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    words = PROBLEMS[kind].format(name=name, things=things, a=a, b=b, c=c)
    return [{"role": "user", "content": words}]


def answer_in_habit(problem, name):
    """What the model is pre-trained to answer."""
    first, second = ("%d%s%d=%d\n" % step for step in solve(*problem))
    box_first, box_second = ("\\boxed{%d}" % step[-1] for step in solve(*problem))
    return {"first step": first + box_first, "no box": first + second.rstrip(),
            "worked through": first + second + box_second}[name]


def habit(text):
    """Which habit an answer shows; whether its numbers are right does not matter here."""
    steps, boxed = text.count("="), text.rstrip().endswith("}")
    names = {(1, True): "first step", (2, False): "no box", (2, True): "worked through"}
    return names.get((steps, boxed), "other")


def make_tokenizer(texts):
    """Byte-level BPE in Qwen's manner, with single digits, trained on `texts`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(texts, trainers.BpeTrainer(
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))  # so any text works
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE)


def rehearsal(seed):
    """-> (model, tokenizer, train_dataset, test_dataset): the tiny world, pre-trained on the spot.

    The same seed gives the same weights; global random numbers are neither used nor disturbed.
    """
    rng = random.Random(seed)
    problems = all_problems()
    rng.shuffle(problems)
    n = len(problems)
    test, grpo, pretrain = problems[: n // 5], problems[n // 5 : n // 2], problems[n // 2 :]
    assert not set(test) & set(grpo + pretrain), "a test problem is also a training problem"

    questions = [as_chat(p, rng)[0]["content"] for p in pretrain]
    answers = [answer_in_habit(p, "worked through") for p in pretrain]
    tokenizer = make_tokenizer(["user", "assistant"] * 99 + questions + answers)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def encode(*pieces):
        """Pieces of text, by turns only read and learned -> token ids, and which are learned."""
        rows = [tokenizer.backend_tokenizer.encode(piece).ids for piece in pieces]
        return sum(rows, []), [i % 2 for i, row in enumerate(rows) for _ in row]

    def problem_row(name):
        problem = rng.choice(pretrain)
        question = tokenizer.apply_chat_template(
            as_chat(problem, rng), tokenize=False, add_generation_prompt=True)
        return encode(question, answer_in_habit(problem, name) + "<|im_end|>")

    # Bare sums besides, six in a row. A word problem takes forty tokens to teach one sum or two;
    # with these the arithmetic is there much sooner.
    sums = sorted({step for problem in pretrain for step in solve(*problem)})

    def drill_row():
        drawn = rng.choices(sums, k=6)
        return encode(*(text for s in drawn for text in ("%d%s%d=" % s[:3], "%d\n" % s[3])))

    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
        # Qwen2's defaults, 1e4 and 0.02, learn far more slowly at this size
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, initializer_range=0.08,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=end, pad_token_id=pad)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs as well
        model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [end, pad]

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in tqdm(range(PRETRAIN_STEPS), "pre-training", leave=False, disable=None):
        # 50 steps up, then linearly down to 0
        rate = min((step + 1) / 50, (PRETRAIN_STEPS - step) / (PRETRAIN_STEPS - 50))
        optimizer.param_groups[0]["lr"] = PRETRAIN_LR * rate
        batch = [problem_row(name) for name in HABITS]
        batch += [drill_row() for _ in range(DRILLS_PER_STEP)]
        width = max(len(ids) for ids, _ in batch)
        # Padded on the right, a causal model needs no attention mask: no token looks that way.
        ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
        learned = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in batch]).bool()
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        # Logits only where the next token is one to learn: the answers, not the questions.
        logits = model.lm_head(hidden[learned[:, 1:]])
        loss = F.cross_entropy(logits, ids[:, 1:][learned[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def dataset(problems):
        rows = [{"prompt": as_chat(p, rng), "answer": str(solve(*p)[1][-1])} for p in problems]
        return Dataset.from_list(rows)

    return model.eval(), tokenizer, dataset(grpo), dataset(test)


# ------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------


def sparkline(values, width=60):
    """A curve in one line of text, from its lowest value to its highest."""
    low, span = min(values), max(values) - min(values) + 1e-9
    some = values[:: math.ceil(len(values) / width)]
    bars = "".join("▁▂▃▄▅▆▇█"[int(7.99 * (value - low) / span)] for value in some)
    return f"{bars}  {values[0]:.2f} -> {values[-1]:.2f}"


def show_group(learner, step, metrics):
    """Print one question and its group of answers, the first group that teaches something."""
    rows, rollout, rewards, advantages = learner.last
    g, G = int((advantages == 0).all(dim=1).long().argmin()), rewards.shape[1]
    question = rows[g]["prompt"][-1]["content"]
    tqdm.write(f"\nstep {step}: {question[:300]}  (answer {rows[g]['answer']})")
    for i in rewards[g].argsort(descending=True).tolist():
        text = " ".join(rollout.texts[g * G + i].split())
        text = text if len(text) < 150 else f"{text[:60]} ... {text[-85:]}"
        tqdm.write(f"  reward {rewards[g, i]:.1f}  advantage {advantages[g, i]:+.2f}  {text}")
    tqdm.write("  equal groups {zero_variance_fraction:.0%}, cut off {truncated_fraction:.0%}, kl "
               "{kl:.4f}; sampling {sample_seconds:.2f} s, scoring {score_seconds:.2f} s, update "
               "{update_seconds:.2f} s, {tokens_per_second:.0f} tokens/s, at most {peak:.2f} GB"
               .format(**metrics, peak=peak_memory()))


# ------------------------------------------------------------------------------------------------
# What it costs: predicted before the first step, held against the machine's limits after each
# ------------------------------------------------------------------------------------------------


def peak_memory():
    """GB held at most so far: on a GPU by tensors, elsewhere by the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    if sys.platform == "win32":
        return 0.0
    import resource  # which Windows does not have
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def cache_bytes(model):
    """Bytes that the KV cache holds for one token, in the precision that the model trains in."""
    c, size = model.config, 2 if computes_in_bf16(model) else 4
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * size * c.num_hidden_layers * c.num_key_value_heads * head_dim


def predict_memory(model, config, prompt_tokens):
    """{what: GB} when memory is fullest. By arithmetic, for models that are built like Qwen2."""
    c, n, V = model.config, model.num_parameters(), model.get_output_embeddings().out_features
    bf16, G, T = computes_in_bf16(model), config.num_generations, config.max_completion_length
    size, N = 2 if bf16 else 4, config.prompts_per_step * G
    tokens = min(config.tokens_per_micro_batch, N * T + N // G * prompt_tokens)
    # What the backward pass of a layer needs of each token, counted on Qwen2: eight vectors of the
    # hidden width and four of the MLP's, and in float32 two more of the first, for the norms.
    layer = size * (8 * c.hidden_size + 4 * c.intermediate_size) + 8 * c.hidden_size
    kept, last = layer * c.num_hidden_layers, 24 * min(512, tokens) * V
    if config.gradient_checkpointing:  # the layers' inputs, and after the logits one whole layer
        kept, last = size * c.hidden_size * c.num_hidden_layers, max(last, tokens * layer)
    always = {"model": size * n, "master weights": 4 * n * bf16, "gradients": 4 * n,
              "Adam": 8 * n, "reference": size * n * (config.beta > 0)}
    sampling = {"KV cache": cache_bytes(model) * N * (prompt_tokens + T), "logits": 20 * N * V}
    update = {"bfloat16 gradients": 2 * n * bf16, "activations": tokens * kept, "logits": last}
    larger = max(sampling, update, key=lambda phase: sum(phase.values()))
    return {name: count / 1e9 for name, count in (always | larger).items() if count}


def plan_memory(model, tokenizer, dataset, config):
    """Choose micro-batches that fit the card, and say where the memory will go. {what: GB}"""
    prompts = tokenizer.apply_chat_template(dataset[:99]["prompt"], return_dict=False)
    width, gpu = max(map(len, prompts)) + 9, torch.cuda.is_available()
    card = torch.cuda.mem_get_info()[1] / 1e9 if gpu else float("inf")
    parts = predict_memory(model, config, width)
    while sum(parts.values()) > 0.9 * card and config.tokens_per_micro_batch > 512:
        config.tokens_per_micro_batch //= 2
        parts = predict_memory(model, config, width)
    if not gpu:
        parts["Python"] = max(peak_memory() - parts["model"], 0.0)
    print(f"memory: {sum(parts.values()):.2f} GB expected (" + ", ".join(
        f"{name} {size:.2f}" for name, size in parts.items()) + ")")
    return parts


def measure_machine(model):
    """(bytes/s, FLOP/s) of a large copy and a large matrix product, in the model's precision."""
    dtype = torch.bfloat16 if computes_in_bf16(model) else torch.float32
    n = 8192 if model.device.type == "cuda" else 4096
    a = torch.randn(n, n, device=model.device).to(dtype)

    def seconds(work):
        started = time.perf_counter()
        work()[0, 0].item()  # item waits for a GPU to be done
        return time.perf_counter() - started

    copy, product = (min(seconds(work) for _ in range(4)) for work in (a.clone, lambda: a @ a))
    return 2 * a.nbytes / copy, 2 * n**3 / product


def show_limits(learner, metrics, machine):
    """Hold a step against the machine: each token of the longest answer takes a reading of all
    weights, and each token of all answers one of its own cache; an update 6 FLOPs a weight and
    token (attention not counted), prompts once."""
    rollout, model, (bandwidth, flops) = learner.last[1], learner.model, machine
    lengths = rollout.completion_mask.sum(dim=1)
    prompts = rollout.attention_mask.sum(dim=1) - lengths
    read = int(lengths.max()) * sum(p.nbytes for p in model.parameters())
    read += cache_bytes(model) * int((lengths * (prompts + lengths // 2)).sum())
    tokens = int(lengths.sum() + prompts[:: learner.last[2].shape[1]].sum())
    share = 6 * model.num_parameters() * tokens / metrics["update_seconds"] / flops
    tqdm.write(f"  sampling {int(lengths.sum()) / metrics['sample_seconds']:.0f} tokens/s; limit "
               f"by memory bandwidth {read / bandwidth:.2f} s. Update {share:.0%} of matrix peak, "
               f"{tokens / metrics['update_seconds']:.0f} tokens/s")


def warn(history):
    """What should stop a person after a few steps, rather than after a night."""
    if all(m["truncated_fraction"] == 1 for m in history):
        tqdm.write("warning: every answer is cut off, and earns 0: --max_completion_length")
    if all(m["zero_variance_fraction"] == 1 for m in history):
        tqdm.write("warning: all answers to a question earn the same: nothing to learn. Too hard, "
                   "too easy, or never boxed? samples.jsonl has some")


def run(config, demo, rehearsing):
    """Load, check, evaluate, train, evaluate, save. Gives the contents of results.json."""
    started, step = time.perf_counter(), 0
    output = demo.output or os.path.join("runs", time.strftime("%Y%m%d-%H%M%S"))
    os.makedirs(output, exist_ok=True)
    if rehearsing:
        torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up
        model, tokenizer, train_data, test_data = rehearsal(config.seed)
        dtype = torch.float32
        print(f"a tiny model, made and pre-trained in {time.perf_counter() - started:.0f} s")
    else:
        train_data, test_data = load_gsm8k(demo.data)
        model, tokenizer, dtype = load_model(demo.model or MODEL, demo.random_weights,
                                             config.max_completion_length)
    if demo.eval_questions is not None:
        test_data = test_data.select(range(min(demo.eval_questions, len(test_data))))
    print(f"{model.num_parameters() / 1e6:.1f} M parameters on {model.device}, {len(train_data)} "
          f"questions to learn from, {len(test_data)} to be tested on")
    preflight(model, tokenizer, train_data, config)
    memory = {} if rehearsing else plan_memory(model, tokenizer, train_data, config)
    machine = measure_machine(model) if demo.random_weights else None
    with open(os.path.join(output, "settings.json"), "w") as file:
        json.dump(asdict(config) | asdict(demo), file, indent=2)
    results_file = os.path.join(output, "results.json")
    results = json.load(open(results_file)) if demo.resume and os.path.exists(results_file) else {}

    def keep_samples(rows, texts, rewards):
        with open(os.path.join(output, "samples.jsonl"), "a") as file:
            for row, some, earned in zip(rows, texts, rewards):
                file.write(json.dumps({"step": step, "prompt": row["prompt"], "completions": some,
                                       "rewards": earned}) + "\n")

    def judge(name):  # evaluate, and keep what came out
        result = evaluate(model, tokenizer, test_data, config.max_completion_length,
                          sampled=rehearsing, temperature=1.0 if demo.random_weights else 0)
        results[name], texts, best = result, result["examples"], results.get("best")
        if name == "during" and not (best and result["accuracy"] <= best["accuracy"]):
            results["best"] = {"step": step, **result}
            save_model(model, tokenizer, os.path.join(output, "best"), dtype)
        if texts:
            tqdm.write(say_result(f"step {step}", result))
        keep_samples(test_data, [[text] for text in texts],
                     [[reward] for reward in boxed_reward(None, texts, test_data["answer"])])
        results["seconds"] = round(time.perf_counter() - started, 1)
        with open(results_file, "w") as file:
            json.dump(results, file, indent=2)

    eval_started = time.perf_counter()
    if "before" not in results:
        judge("before")
    eval_seconds = time.perf_counter() - eval_started
    history, habits = [], []
    reward = random_reward if demo.random_weights else boxed_reward
    for metrics, learner in training_steps(model, tokenizer, train_data, reward, config, output,
                                           demo.resume):
        history.append(metrics)
        step, (rows, rollout, rewards, _) = metrics["step"], learner.last
        if rehearsing:
            habits.append([habit(text) for text in rollout.texts])
        if len(history) == 1:
            seconds = sum(metrics[f"{part}_seconds"] for part in ("sample", "score", "update"))
            count = 1 + (config.steps // demo.eval_every if demo.eval_every else 0)
            tqdm.write(f"to go: about {seconds * (config.steps - step) / 60:.0f} minutes, and "
                       f"{count} x {eval_seconds:.0f} s of evaluation")
        if len(history) == 3:
            warn(history)
        if demo.show_steps and (step == 1 or step % demo.show_steps == 0):
            show_group(learner, step, metrics)
            keep_samples(rows[:1], [rollout.texts[: config.num_generations]], rewards.tolist())
        if machine:
            show_limits(learner, metrics, machine)
        if demo.eval_every and step % demo.eval_every == 0 and step < config.steps:
            judge("during")
    if history and step < config.steps:
        print(f"stopped after step {step}; go on with --output {output} --resume")
        return results
    judge("after")
    if not demo.random_weights:
        save_model(model, tokenizer, output, dtype)
    for row, *texts in zip(test_data, results["before"]["examples"], results["after"]["examples"]):
        print(f"\n{row['prompt'][-1]['content']}  (answer {row['answer']})")
        for when, text in zip(("before", "after"), texts):
            print(f"{when:>8}: " + text.strip().replace("\n", "\n          "))
    curves = {name: [m[key] for m in history] for name, key in
              (("reward", "reward_mean"), ("tokens", "completion_length"))}
    curves |= {name: [step.count(name) / len(step) for step in habits]
               for name in (*dict.fromkeys(HABITS), "other") if habits}
    print("\nfrom the first step to the last, each curve from its lowest value to its highest:")
    for name, values in curves.items():
        print(f"{name:>14} {sparkline(values or [0])}")
    print()
    for name in ("before", "best", "after"):  # best: chosen on these very questions, so flattered
        if name in results and len(test_data):
            print(say_result(name, results[name]))
    print(f"{results['seconds']:.0f} s in all; model, metrics.jsonl, samples.jsonl: {output}")
    if memory:
        expected, peak = sum(memory.values()), peak_memory()
        print(f"peak memory {peak:.2f} GB, expected {expected:.2f} GB: {peak / expected - 1:+.0%}")
    if not demo.random_weights:
        print(HONEST if rehearsing else CHAT.format(output=output, system=SYSTEM_PROMPT))
    return results


def main():
    """Read the flags, decide between the real thing and the rehearsal, and say what went wrong."""
    parser = HfArgumentParser((GRPOConfig, DemoConfig), description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    try:
        config, demo = parser.parse_args_into_dataclasses()
        gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
        rehearsing = demo.rehearsal or not (gpu or demo.model or demo.data or demo.random_weights)
        if rehearsing and not demo.rehearsal:
            print("no GPU here, so this is the rehearsal: a tiny model that learns on the CPU. "
                  f"The real thing would take days: --model {MODEL}")
        # What was typed still wins over these when the flags are read again.
        chosen = REHEARSAL if rehearsing else MEASURING if demo.random_weights else {}
        parser.set_defaults(**chosen)
        config, demo = parser.parse_args_into_dataclasses()
        if demo.resume and not demo.output:
            raise ValueError("--resume needs --output: which run?")
        run(config, demo, rehearsing)
    except torch.OutOfMemoryError:
        sys.exit("\nstopped: out of memory while sampling. A smaller --max_completion_length or "
                 "--prompts_per_step helps; --random_weights tries it out in a minute")
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        sys.exit(f"\nstopped: {error}")


if __name__ == "__main__":
    main()
