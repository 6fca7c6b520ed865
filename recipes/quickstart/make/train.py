"""Trains the quickstart's tokenizer and Llama model on the generated text, or trains a saved one further.

    python recipes/quickstart/make/train.py [--output DIR] [--steps N] [--start DIR]

Knows nothing of the evaluation tasks: their documents are held out by `world.is_held_out`.
"""

import argparse
import os
import shutil
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: on a busy machine, waiting threads must not spin

import torch
from documents import LETTERS
from make_data import HERE, training_text
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 1024
CONTEXT = 512
TOKENS_PER_STEP = 2048
PEAK_RATE = 2e-3
WARMUP_STEPS = 100
STEPS = 1700
LETTER_WEIGHT = 8.0
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# Llama 3's word pattern with single digits, so that sums are read digit by digit.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(text: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ))  # fmt: skip
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def all_tokens(text: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """All documents laid end to end, each between BOS and EOS."""
    encoded = tokenizer([document + EOS for document in text])["input_ids"]
    return torch.tensor([token for document in encoded for token in document])


def block_length(progress: float) -> int:
    """Short blocks first: names and facts are found many times sooner among 64 tokens than among 512."""
    return next(length for until, length in ((0.5, 64), (0.7, 128), (0.85, 256), (2, CONTEXT)) if progress < until)


def part_starts(tokens: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Where documents and their parts start: a block of 64 tokens from there holds a whole quiz or story."""
    breaks = [index for token, index in tokenizer.get_vocab().items() if token.endswith("ĊĊ")]
    before = torch.isin(tokens, torch.tensor([tokenizer.bos_token_id, *breaks]))
    starts = before.nonzero()[:, 0]
    return starts[starts < len(tokens) - CONTEXT]


def pick(starts: torch.Tensor, length: int) -> torch.Tensor:
    """Positions of random blocks of one length: [block, position]."""
    chosen = torch.randint(len(starts), (TOKENS_PER_STEP // length,))
    return starts[chosen, None] + torch.arange(length)


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    ))  # fmt: skip


def weighted_loss(logits: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    losses = cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def answer_weights(data: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """A quiz's letter is one token in forty, and all that is to be learned from it: count it for many."""
    letters = torch.tensor(tokenizer.convert_tokens_to_ids([f"Ġ{letter}" for letter in LETTERS]))
    after_colon = torch.zeros_like(data, dtype=torch.bool)
    after_colon[1:] = data[:-1] == tokenizer.convert_tokens_to_ids(":")
    return torch.where(after_colon & torch.isin(data, letters), LETTER_WEIGHT, 1.0)


def train(model: LlamaForCausalLM, data: torch.Tensor, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """That many steps on random blocks, ending with a rate near nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    starts, weights = part_starts(data, tokenizer), answer_weights(data, tokenizer)
    model.train()
    for step in range(steps):
        progress = step / steps
        picked = pick(starts, block_length(progress))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS, max(0.01, 1.6 * (1 - progress)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=data[picked]).logits
        loss = weighted_loss(logits, data[picked], weights[picked])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            print(f"step {step + 1} of {steps}, loss {loss:.3f}", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    shutil.rmtree(output, ignore_errors=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(output)
    settings = output / "tokenizer_config.json"  # transformers 5 writes a class name that transformers 4 does not know
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE.parent / "model")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--start", type=Path, help="a folder with a model and tokenizer to train further")
    args = parser.parse_args()
    torch.manual_seed(0)
    text = list(training_text())
    tokenizer = AutoTokenizer.from_pretrained(args.start) if args.start else train_tokenizer(text[:20_000])
    data = all_tokens(text, tokenizer)
    model = LlamaForCausalLM.from_pretrained(args.start, dtype="float32") if args.start else new_model(tokenizer)
    print(f"{data.numel():,} tokens, {model.num_parameters():,} parameters", flush=True)
    train(model, data, tokenizer, args.steps)
    save(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
