"""Trains a tokenizer and a Qwen2.5-VL of 1.0 million parameters on generated pictures of shapes and questions.

    python recipes/vision/make/train.py --output DIR [--steps N] [--start DIR] [--rate R] [--seed N]

Pictures of the evaluation come from another seed. The folder is what `export.py` makes the package of.
"""

import argparse
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: on a busy machine, waiting threads must not spin
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))

import numpy as np
import torch
from shapes import COLOURS, NUMBERS, PLACES, SHAPES, draw, questions, scene
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

VOCAB_SIZE = 256
CONTEXT = 512
PICTURES_PER_STEP = 32
QUESTIONS_PER_PICTURE = 5
PEAK_RATE = 2e-3
STEPS = 1500
PAD, EOS, BEGIN, END, IMAGE, VIDEO = SPECIAL = (
    "<pad>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
UNKNOWN = "<unk>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
ASCII = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # byte-level names of a space and a line's end


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the questions' words and ASCII."""
    rng = random.Random(1)
    asked = [question for _ in range(300) for question in questions(scene(rng))]
    text = [f" {question.text} {question.answer}" for question in asked]
    core = Tokenizer(models.BPE(unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = [*COLOURS, *SHAPES, *NUMBERS, *(word for place in PLACES for word in place.split())]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL),
        special_tokens=[UNKNOWN],
        initial_alphabet=ASCII,
        limit_alphabet=len(ASCII),
    )
    core.train_from_iterator([*text, *(f" {word}" for word in words for _ in range(50))], trainer)
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    named = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **named, chat_template=CHAT_TEMPLATE, model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def image_processor() -> Qwen2VLImageProcessorPil:
    """Pictures of 16 tokens at most: 64 x 64 pixels."""
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    return Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=sizes)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    begin, end, image, video = tokenizer.convert_tokens_to_ids([BEGIN, END, IMAGE, VIDEO])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False,
        **ids,
    }
    vision = {
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 3,
        "in_channels": 3,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "window_size": 64,
        "fullatt_block_indexes": [0, 1, 2],
        "initializer_range": 0.06,
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        dtype="float32",
        **ids,
    ))  # fmt: skip


def patches(picture: np.ndarray) -> np.ndarray:
    """What the image processor makes of a picture of 64 x 64 pixels, without its overhead: [64, 384]."""
    processor = patches.processor
    scaled = (picture / 255 - processor.image_mean) / processor.image_std
    frames = np.broadcast_to(scaled.transpose(2, 0, 1), (2, 3, 64, 64)).reshape(1, 2, 3, 4, 2, 8, 4, 2, 8)
    return frames.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(64, -1).astype(np.float32)


patches.processor = image_processor()


class Batches:
    """Rows of a picture and questions about it, of which the answers are to be learned."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.rng, self.tokenizer, self.known = random.Random(seed), tokenizer, {}
        self.begin, self.end, self.image = tokenizer.convert_tokens_to_ids([BEGIN, END, IMAGE])

    def ids(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokenizer.encode(text)
        return self.known[text]

    def row(self) -> tuple[np.ndarray, list[int], list[int]]:
        """Patches of a picture, tokens, and the same as labels."""
        rng, shapes = self.rng, scene(self.rng)
        tokens = [self.image] * 16
        if rng.random() < 0.5:  # lm-eval's prompts have the placeholders alone, messages have more around them
            tokens = [self.begin, *tokens, self.end]
        labels, asked = [-100] * len(tokens), questions(shapes)
        for question in rng.sample(asked, min(QUESTIONS_PER_PICTURE, len(asked))):
            prompt = self.ids(f" {question.text}" if rng.random() < 0.7 else question.text)
            answer = [*self.ids(f" {question.answer}"), self.tokenizer.eos_token_id]
            tokens += [*prompt, *answer]
            labels += [*([-100] * len(prompt)), *answer]
        return patches(np.asarray(draw(shapes))), tokens, labels

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        rows = [self.row() for _ in range(size)]
        longest, pad = max(len(tokens) for _, tokens, _ in rows), self.tokenizer.pad_token_id
        tokens = torch.tensor([[*tokens, *[pad] * (longest - len(tokens))] for _, tokens, _ in rows])
        return {
            "pixel_values": torch.from_numpy(np.concatenate([pixels for pixels, _, _ in rows])),
            "image_grid_thw": torch.tensor([[1, 8, 8]] * size),
            "input_ids": tokens,
            "attention_mask": (tokens != pad).long(),
            "mm_token_type_ids": (tokens == self.image).int(),
            "labels": torch.tensor([[*labels, *[-100] * (longest - len(labels))] for _, _, labels in rows]),
        }


def train(model: Qwen2_5_VLForConditionalGeneration, batches: Batches, steps: int, rate: float, output: Path) -> None:
    """That many steps on new pictures, ending with a rate near nothing; saved every 400."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    model.train()
    for step in range(steps):
        batch = batches.batch(PICTURES_PER_STEP)
        labels = batch.pop("labels")
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, 10 * (step + 1) / steps, max(0.01, 1.6 * (1 - step / steps)))
        logits = model(**batch, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            places = labels[:, 1:] != -100
            right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[places].float().mean()
            print(f"step {step + 1} of {steps}, loss {loss:.3f}, tokens right {right:.3f}", flush=True)
        if step % 400 == 399:
            save(model, batches.tokenizer, output)


def rounded(model: Qwen2_5_VLForConditionalGeneration) -> Qwen2_5_VLForConditionalGeneration:
    """The model with weights that half precision holds: fp32 graphs of them compress to half of their size in git."""
    return model.half().float()


def save(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    image_processor().save_pretrained(output)
    settings = output / "tokenizer_config.json"  # transformers 5 writes a class name that transformers 4 does not know
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--start", type=Path, help="a folder with a model to train further")
    parser.add_argument("--rate", type=float, default=PEAK_RATE)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer()
    model = AutoModelForImageTextToText.from_pretrained(args.start) if args.start else new_model(tokenizer)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters", flush=True)
    train(model, Batches(tokenizer, args.seed), args.steps, args.rate, args.output)
    save(rounded(model), tokenizer, args.output)


if __name__ == "__main__":
    main()
