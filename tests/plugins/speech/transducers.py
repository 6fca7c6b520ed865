"""A tiny streaming transducer with random weights, in the files and names of the public recipe of Nemotron's speech
model: an encoder with caches over chunks of 560 ms, an LSTM prediction network, a joint network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MELS, HIDDEN, LAYERS, CONTEXT, CONV, UNITS, STACKED, WORDS = 16, 12, 2, 14, 4, 10, 2, 20
FRAMES, PRE_ENCODE, EVERY = 56, 9, 8
SEED, SCALE, BIAS = 5, 2.5, 2.0
ENCODER = {
    "inputs": {
        "audio_features": "audio_signal",
        "input_lengths": "length",
        **{name: name for name in ("cache_last_channel", "cache_last_time", "cache_last_channel_len")},
    },
    "outputs": {
        "encoder_outputs": "outputs",
        "output_lengths": "encoded_lengths",
        **{f"{name}_next": f"{name}_next" for name in ("cache_last_channel", "cache_last_time")},
        "cache_last_channel_len_next": "cache_last_channel_len_next",
    },
}
DECODER = {
    "inputs": {"targets": "targets", "lstm_hidden_state": "h_in", "lstm_cell_state": "c_in"},
    "outputs": {"outputs": "decoder_output", "lstm_hidden_state": "h_out", "lstm_cell_state": "c_out"},
}
JOINER = {
    "inputs": {"encoder_outputs": "encoder_output", "decoder_outputs": "decoder_output"},
    "outputs": {"logits": "joint_output"},
}


class Encoder(nn.Module):
    """Each frame sees the frames of earlier chunks through both caches, and the number of those that are filled."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(2 * MELS * EVERY, HIDDEN)
        self.mixed = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.convs = nn.ModuleList(nn.Conv1d(HIDDEN, HIDDEN, CONV + 1, groups=HIDDEN) for _ in range(LAYERS))

    def forward(self, mel: Tensor, length: Tensor, channel: Tensor, time: Tensor, filled: Tensor) -> tuple[Tensor, ...]:
        batch = mel.shape[0]
        parts = [mel[:, start : start + FRAMES].reshape(batch, FRAMES // EVERY, -1) for start in (1, PRE_ENCODE)]
        x = self.front((torch.cat(parts, 2) + 6) * 0.3)
        channels, times = [], []
        place = torch.arange(CONTEXT)[None] >= CONTEXT - filled[:, None]
        for number, (mix, conv) in enumerate(zip(self.mixed, self.convs, strict=True)):
            seen = torch.cat([channel[:, number], x], 1)
            channels.append(seen[:, -CONTEXT:])
            valid = torch.cat([place, torch.ones(batch, FRAMES // EVERY, dtype=torch.bool)], 1)[:, None]
            weights = torch.softmax((x @ seen.transpose(1, 2)).masked_fill(~valid, -1e9), -1)
            wide = torch.cat([time[:, number], (x + mix(weights @ seen)).transpose(1, 2)], 2)
            times.append(wide[:, :, -CONV:])
            x = torch.tanh(conv(wide).transpose(1, 2)) + x
        count = (length - PRE_ENCODE + EVERY - 1) // EVERY
        after = torch.clamp(filled + FRAMES // EVERY, max=CONTEXT)
        return x, count, torch.stack(channels, 1), torch.stack(times, 1), after


class Decoder(nn.Module):
    """The prediction network."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS + 1, UNITS)
        self.lstm = nn.LSTM(UNITS, UNITS, STACKED, batch_first=True)

    def forward(self, targets: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, (hidden, cell) = self.lstm(self.embedding(targets), (hidden, cell))
        return out.transpose(1, 2), hidden, cell


class Joiner(nn.Module):
    """The joint network."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded, self.predicted = nn.Linear(HIDDEN, UNITS), nn.Linear(UNITS, UNITS)
        self.out = nn.Linear(UNITS, WORDS + 1)

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        both = self.encoded(encoded)[:, :, None] + self.predicted(predicted)[:, None]
        return self.out(torch.tanh(both))


def modules(seed: int = SEED) -> tuple[Encoder, Decoder, Joiner]:
    """The three networks, with weights that make both blanks and tokens likely."""
    torch.manual_seed(seed)
    made = Encoder(), Decoder(), Joiner()
    with torch.no_grad():
        for parameter in (p for module in made for p in module.parameters()):
            parameter.mul_(SCALE)
        made[2].out.bias[WORDS] += BIAS
    return tuple(module.eval() for module in made)


def transducer_export(folder: Path, *, batched: bool = True, **changes: Any) -> Path:
    """The package in `folder`, whose shapes leave the batch open, or not, as the public recipe's; `changes` are of
    genai_config.json's model."""
    folder.mkdir(parents=True, exist_ok=True)
    caches = torch.zeros(2, LAYERS, CONTEXT, HIDDEN), torch.zeros(2, LAYERS, HIDDEN, CONV)
    state = torch.zeros(STACKED, 2, UNITS)
    encoder = (torch.zeros(2, PRE_ENCODE + FRAMES, MELS), torch.full((2,), 65), *caches, torch.zeros(2).long())
    given = [
        ("encoder", ENCODER, encoder, {"h": 0}),
        ("decoder", DECODER, (torch.zeros(2, 1).long(), state, state), {"h": 1}),
        ("joint", JOINER, (torch.zeros(2, 1, HIDDEN), torch.zeros(2, 1, UNITS)), {"h": 0}),
    ]
    for module, (name, names, inputs, _) in zip(modules(), given, strict=True):
        wires = [*names["inputs"].values(), *names["outputs"].values()]
        axes = {wire: {1 if wire[:2] in ("h_", "c_") else 0: "batch"} for wire in wires}
        if not batched:
            inputs = tuple(one[:, :1] if one is state else one[:1] for one in inputs)
        torch.onnx.export(
            module,
            inputs,
            str(folder / f"{name}.onnx"),
            input_names=list(names["inputs"].values()),
            output_names=list(names["outputs"].values()),
            dynamic_axes=axes if batched else None,
            dynamo=False,
        )
    sizes = {"num_mels": MELS, "fft_size": 512, "hop_length": 160, "win_length": 400, "preemph": 0.97}
    model = {
        "type": "nemotron_speech",
        "vocab_size": WORDS + 1,
        **sizes,
        "log_eps": 5.96046448e-08,
        "subsampling_factor": EVERY,
        "left_context": CONTEXT,
        "conv_context": CONV,
        "pre_encode_cache_size": PRE_ENCODE,
        "sample_rate": 16000,
        "chunk_samples": 160 * FRAMES,
        "blank_id": WORDS,
        "max_symbols_per_step": 3,
        "encoder": {"filename": "encoder.onnx", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, **ENCODER},
        "decoder": {"filename": "decoder.onnx", "hidden_size": UNITS, "num_hidden_layers": STACKED, **DECODER},
        "joiner": {"filename": "joint.onnx", **JOINER},
    }
    config = {"model": {**model, **changes}, "search": {}}
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    words = ["<unk>", *(("\u2581" if number % 3 else "") + chr(96 + number) for number in range(1, WORDS)), "<blank>"]
    vocabulary = [[word, 0.0 if word[0] == "<" else -float(number)] for number, word in enumerate(words)]
    unknown = {"id": 0, "content": "<unk>", "special": True, "normalized": False}
    unknown |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [unknown]}
    tokenizer |= {"normalizer": replaced, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    tokenizer["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {"tokenizer_class": "T5Tokenizer", "unk_token": "<unk>", "model_max_length": 1024}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
