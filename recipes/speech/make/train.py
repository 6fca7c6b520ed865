"""Trains a tokenizer and a Whisper of 0.3 million parameters on generated sounds and the words for them.

    python recipes/speech/make/train.py [--output DIR] [--steps N]

Sounds of the evaluation come from another seed. Most steps see windows of 4 s, which are several times faster than
Whisper's of 30 s; the last ones see 30 s, in which the model learns to pass over silence.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: on a busy machine, waiting threads must not spin
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tones import RATE, WORDS, some_words, sound
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

SHORT, LONG = 4, 30  # seconds of a window
STEPS = 600
LONG_STEPS = 40
PEAK_RATE = 2e-3
WARMUP_STEPS = 50
EOS, START, LANGUAGE, TASK, PLAIN = SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>",
)  # fmt: skip
ASCII = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # byte-level names of a space and a line's end


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the words and ASCII; special tokens first, as ids of a small vocabulary."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=192, special_tokens=list(SPECIAL), initial_alphabet=ASCII)
    core.train_from_iterator([f" {word}" for word in WORDS for _ in range(50)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, bos_token=EOS, pad_token=EOS, unk_token=EOS,
        additional_special_tokens=list(SPECIAL[1:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip


def new_model(tokenizer: PreTrainedTokenizerFast, seconds: int) -> WhisperForConditionalGeneration:
    return WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=80,
        max_source_positions=50 * seconds,
        max_target_positions=64,
        init_std=0.06,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids(START),
        suppress_tokens=[],
        begin_suppress_tokens=[],
        dtype="float32",
    ))  # fmt: skip


def lengthened(model: WhisperForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> torch.nn.Module:
    """The model for windows of 30 s: Whisper's encoder positions are sines, which are the same in both."""
    longer, weights = new_model(tokenizer, LONG), model.state_dict()
    del weights["model.encoder.embed_positions.weight"]
    missing, unexpected = longer.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["model.encoder.embed_positions.weight"], [])
    return longer


class Batches:
    """Sounds with the tokens that the decoder is given and those that it shall say."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.rng, self.tokenizer = np.random.default_rng(seed), tokenizer
        self.extractors = {length: WhisperFeatureExtractor(chunk_length=length) for length in (SHORT, LONG)}
        self.prefix = tokenizer.convert_tokens_to_ids([START, LANGUAGE, TASK, PLAIN])

    def batch(self, size: int, most: int, seconds: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B, 80, frames] and tokens [B, T], behind their end -100."""
        texts = [some_words(self.rng, most) for _ in range(size)]
        sounds = [sound(text, self.rng) for text in texts]
        features = self.extractors[seconds](sounds, sampling_rate=RATE, return_tensors="pt")["input_features"]
        words = [self.tokenizer.encode("".join(f" {word}" for word in text)) for text in texts]
        rows = [[*self.prefix, *tokens, self.tokenizer.eos_token_id] for tokens in words]
        longest = max(map(len, rows))
        return features, torch.tensor([[*row, *[-100] * (longest - len(row))] for row in rows])


def train(model: torch.nn.Module, batches: Batches, steps: int, rate: float, seconds: int) -> None:
    """That many steps on new sounds, longer ones by and by, ending with a rate near nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    num_prefix = len(batches.prefix)
    model.train()
    for step in range(steps):
        most = 6 if seconds == LONG else 1 + min(5, 10 * step // steps)
        features, rows = batches.batch(32 if seconds == SHORT else 8, most, seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(
                1.0, (step + 1) / min(WARMUP_STEPS, steps // 4), max(0.01, 1.6 * (1 - step / steps))
            )
        given = rows[:, :-1].clamp(min=0)
        logits = model(input_features=features, decoder_input_ids=given, use_cache=False).logits[:, num_prefix - 1 :]
        labels = rows[:, num_prefix:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 19:
            right = (logits.argmax(-1) == labels)[labels != -100].float().mean()
            print(f"{seconds} s: step {step + 1} of {steps}, loss {loss:.3f}, tokens right {right:.3f}", flush=True)


def save(model: torch.nn.Module, batches: Batches, output: Path) -> None:
    """The model in a folder like Whisper's own, with what its decoder begins with."""
    shutil.rmtree(output, ignore_errors=True)
    _, *forced = batches.prefix
    eos = batches.tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        eos_token_id=eos, pad_token_id=eos, bos_token_id=eos, decoder_start_token_id=batches.prefix[0],
        forced_decoder_ids=[[place, token] for place, token in enumerate(forced, 1)], max_length=64,
    )  # fmt: skip
    model.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)
    batches.tokenizer.save_pretrained(output)
    batches.extractors[LONG].save_pretrained(output)
    settings = output / "tokenizer_config.json"  # transformers 5 writes a class name that transformers 4 does not know
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1] / "model")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.manual_seed(1)
    tokenizer = train_tokenizer()
    model, batches = new_model(tokenizer, SHORT), Batches(tokenizer, 1)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters", flush=True)
    train(model, batches, args.steps, PEAK_RATE, SHORT)
    model = lengthened(model, tokenizer)
    train(model, batches, LONG_STEPS, PEAK_RATE / 4, LONG)
    save(model.half().float(), batches, args.output)  # weights of half precision compress to half of their size in git


if __name__ == "__main__":
    main()
