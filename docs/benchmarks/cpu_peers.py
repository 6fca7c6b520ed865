"""Prompts, windows and decoding on a CPU beside onnxruntime-genai and llama.cpp: the same weights and tokens, by turns.

    python docs/benchmarks/make_models.py MODELS --shape smollm2-135m --precision fp32,int4
    python docs/benchmarks/cpu_peers.py MODELS --peers generator,engine=GENAI/bin/python,llama=LLAMA/bin/python

MODELS holds hf, fp32 and int4. A peer is optional, and runs in the Python that is named after it (this one else):

    generator   onnxruntime-genai's Generator, all rows in one batch of equally long prompts
    engine      onnxruntime-genai's Engine (0.18 and later), which takes requests as they come
    llama       llama-cpp-python, with gguf and safetensors beside it: MODELS/fp32.gguf, MODELS/int4.gguf (q4_0, its
                head, too) are written of the weights in hf. What its logits say is worked out beside the clock.

Every process stays open and takes its turn at each piece of work, so that all meet the same neighbours on the machine:
a ratio is that of tokens per second of the processor in one round, and the median over the rounds counts. Tokens are
random ones. Answers are held against ours: tokens that are equal up to the first that is not, or, of windows, the
largest difference of a log-probability. --num-threads is 1: with more, threads that wait for each other spin,
llama.cpp's above all, and on a shared machine processor seconds count that.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import parser_of, spread, table, turns, write


@dataclass(frozen=True)
class Work:
    """`rows` texts of `length` random tokens, each with an answer of `least` to `most` greedy tokens; none: scored."""

    rows: int
    length: int
    least: int = 0
    most: int = 0

    def draw(self, seed: int, vocab_size: int) -> dict[str, Any]:
        """Texts [rows][length], and how many tokens to answer each with."""
        rng = random.Random(seed)
        texts = [[rng.randrange(4, vocab_size) for _ in range(self.length)] for _ in range(self.rows)]
        return {"texts": texts, "answers": [rng.randint(self.least, self.most) for _ in range(self.rows)]}


WORKS = {
    "window": Work(1, 2048),
    "prompts": Work(8, 512, 1, 1),
    "16 rows": Work(16, 16, 64, 64),
    "64 rows": Work(64, 16, 32, 32),
    "any length": Work(96, 60, 8, 128),
    "like GSM8K": Work(16, 1130, 64, 192),
}
"""Every position of a long text; prompts alone; decoding almost alone; short prompts and long ones, with
answers of several lengths."""

TINY = {"tiny window": Work(1, 64), "tiny prompts": Work(2, 32, 1, 1), "3 rows": Work(3, 8, 4, 8)}
Answer = list[list[float]]
Answering = Callable[[list[list[int]], list[int]], Answer | Callable[[], Answer]]


def ours(model: Path, threads: int) -> Answering:
    import olive_ext
    from olive_ext.session.requests import GenerationRequest, ScoringRequest

    session = olive_ext.open(str(model), kind="onnx", engine={"num_threads": threads})

    def answer(texts: list[list[int]], answers: list[int]) -> Answer:
        session.gc()
        if not any(answers):
            scored = session.loglikelihood([ScoringRequest(text[:1], text[1:]) for text in texts])
            return [list(output.token_logprobs) for output in scored]
        asked = [GenerationRequest(text, max_new_tokens=most) for text, most in zip(texts, answers, strict=True)]
        return [list(output.tokens) for output in session.generate(asked)]

    return answer


def _genai(model: Path, threads: int, **settings: Any) -> tuple[Any, Any]:
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(model))
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}, **settings}))
    return onnxruntime_genai, onnxruntime_genai.Model(config)


def generator(model: Path, threads: int) -> Answering:
    import numpy as np

    library, opened = _genai(model, threads)

    def answer(texts: list[list[int]], answers: list[int]) -> Answer:
        given = library.GeneratorParams(opened)
        length = len(texts[0])
        given.set_search_options(do_sample=False, batch_size=len(texts), max_length=length + max(answers))
        running = library.Generator(opened, given)
        running.append_tokens(np.array(texts, np.int32))
        for _ in range(max(answers)):
            running.generate_next_token()
        return [running.get_sequence(row)[length : length + most].tolist() for row, most in enumerate(answers)]

    return answer


def engine(model: Path, threads: int) -> Answering:
    library, opened = _genai(model, threads, engine={"static_batching": {"max_batch_size": 64}})
    running = library.Engine(opened)
    events = running.create_event_buffer(256)
    has_token = int(library.EngineEventFlags.TOKEN.value)

    def answer(texts: list[list[int]], answers: list[int]) -> Answer:
        requests: list[Any] = []
        for text, most in zip(texts, answers, strict=True):
            options = library.RequestOptions()
            options.set_max_session_tokens(len(text) + most)
            requests.append(running.create_request(options=options))
            turn = library.TurnOptions(requests[-1])
            turn.set_do_sample(False)
            turn.set_max_generated_tokens(most)
            turn.set_min_generated_tokens(most)
            requests[-1].begin_turn(text, turn)
        found: Answer = [[] for _ in requests]
        while running.has_pending_requests():
            for event in running.run(events):
                if int(event.flags) & has_token:
                    found[requests.index(event.request)].append(event.token)
        for request in requests:
            request.close()
        return found

    return answer


def llama(model: Path, threads: int) -> Answering:
    import llama_cpp
    import numpy as np

    file = model.with_suffix(".gguf")
    if not file.exists():
        write_gguf(model.parent / "hf", file, is_int4=model.name == "int4")
    opened = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(opened))
    contexts: dict[tuple[int, int], Any] = {}  # made in the first round, which is not counted

    def answer(texts: list[list[int]], answers: list[int]) -> Answer | Callable[[], Answer]:
        rows, length = len(texts), len(texts[0])
        given = llama_cpp.llama_context_default_params()
        given.n_seq_max, given.n_batch = rows, rows * length
        given.n_ctx = rows * (-256 * (-(length + max(answers)) // 256))
        given.n_threads = given.n_threads_batch = threads
        if (rows, length) not in contexts:
            contexts[rows, length] = llama_cpp.llama_init_from_model(opened, given)
        context = contexts[rows, length]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)

        def step(fed: list[tuple[int, int, int, bool]]) -> Any:
            """Feeds (token, position, row, is read) of each; logits [read ones, vocabulary]."""
            batch = llama_cpp.llama_batch_init(len(fed), 0, 1)
            batch.n_tokens = len(fed)
            for index, (token, position, row, is_read) in enumerate(fed):
                batch.token[index], batch.pos[index], batch.logits[index] = token, position, is_read
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            status = llama_cpp.llama_decode(context, batch)
            llama_cpp.llama_batch_free(batch)
            if status:
                raise SystemExit(f"llama_decode: {status}")
            read = sum(is_read for *_, is_read in fed)
            return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (read, vocab_size))

        if not any(answers):
            logits = step([(token, position, 0, True) for position, token in enumerate(texts[0][:-1])])
            return lambda: [_scored(logits.astype(np.float64), texts[0][1:])]
        last = length - 1
        fed = [(token, at, row, at == last) for row, text in enumerate(texts) for at, token in enumerate(text)]
        found: Answer = [[] for _ in texts]
        while fed:
            read = [row for _, _, row, is_read in fed if is_read]
            for row, token in zip(read, step(fed).argmax(-1).tolist(), strict=True):
                found[row].append(token)
            fed = [(own[-1], last + len(own), row, True) for row, own in enumerate(found) if len(own) < answers[row]]
        return found

    return answer


def _scored(logits: Any, targets: list[int]) -> list[float]:
    import numpy as np

    most = logits.max(-1, keepdims=True)
    sums = most[:, 0] + np.log(np.exp(logits - most).sum(-1))
    return list((logits[range(len(targets)), targets] - sums).tolist())


def write_gguf(hf: Path, file: Path, *, is_int4: bool) -> None:
    """A Llama checkpoint with tied embeddings as GGUF, without its tokenizer: float32, or q4_0 (blocks of 32 with a
    float16 scale), its embeddings, too, which are the head's."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    out = gguf.GGUFWriter(file.with_suffix(".part"), "llama")
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_rope_dimension_count(config["hidden_size"] // heads)
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, values in load_file(hf / "model.safetensors").items():
        turned = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        if turned:  # rotary halves lie side by side there
            values = values.reshape(turned, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q4_0 if is_int4 and values.ndim == 2 else gguf.GGMLQuantizationType.F32
        known = names.get_name(name, try_suffixes=(".weight",))
        out.add_tensor(known, gguf.quants.quantize(values, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    file.with_suffix(".part").rename(file)


BACKENDS = {"ours": ours, "generator": generator, "engine": engine, "llama": llama}


def serve(name: str, model: Path, threads: int) -> None:
    """Answers each line of the standard input, a `Work.draw`, with a line: seconds of processor and clock, answers."""
    answer = BACKENDS[name](model, threads)
    print("{}", flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        wall, processor = time.perf_counter(), time.process_time()
        found: Any = answer(**given)
        seconds = {"processor": time.process_time() - processor, "wall": time.perf_counter() - wall}
        print(json.dumps({**seconds, "answers": found() if callable(found) else found}), flush=True)


class Peer:
    """A process that serves one backend on one model."""

    def __init__(self, name: str, python: str, model: Path, threads: int) -> None:
        words = [python, str(Path(__file__).resolve()), "--serve", name, str(model), str(threads)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = name
        self._read()

    def ask(self, given: dict[str, Any]) -> dict[str, Any]:
        """The line that answers this one."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                read: dict[str, Any] = json.loads(line)
                return read
        raise SystemExit(f"{self.name} ended with {self.process.wait()}; what it said stands above")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def agreement(ours: Answer, theirs: Answer) -> tuple[str, float]:
    """Of log-probabilities the largest difference; of tokens those equal up to the first that is not, over all."""
    pairs = [list(zip(one, other, strict=True)) for one, other in zip(ours, theirs, strict=True)]
    if isinstance(ours[0][0], float):
        return "nats", max(abs(a - b) for row in pairs for a, b in row)
    equal = [next((at for at, (a, b) in enumerate(row) if a != b), len(row)) for row in pairs]
    return "tokens", sum(equal) / sum(map(len, pairs))


def measure(works: dict[str, Work], peers: dict[str, Peer], vocab_size: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each piece of work and backend that has it: seconds of each round, ratios to ours, agreement."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for number, names in turns(peers, rounds):
        for work, what in works.items():
            given = what.draw(number, vocab_size)
            found = {name: peers[name].ask(given) for name in names if what.most or name in ("ours", "llama")}
            ours = found["ours"]
            for name, own in found.items():
                row = rows.setdefault((work, name), {"work": work, "backend": name, "rounds": []})
                agreed = agreement(ours["answers"], own.pop("answers") if own is not ours else ours["answers"])
                tokens = what.rows * what.length + sum(given["answers"])
                ratio = own["processor"] / ours["processor"]
                row["rounds"] += [{**own, "tokens": tokens, "ratio": ratio, "agreement": agreed}] if number else []
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    for row in rows.values():
        for one in row["rounds"]:
            one.pop("answers", None)
    return list(rows.values())


def lines(precision: str, rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Cells of the table."""
    for row in rows:
        each = row["rounds"]
        speed = f"{median(one['tokens'] / one['processor'] for one in each):.0f}"
        kind, number = each[0]["agreement"][0], median(one["agreement"][1] for one in each)
        agreed = f"{number:.1g} nats" if kind == "nats" else f"{number:.0%}"
        others = () if row["backend"] != "ours" else ("", "")
        yield (precision, row["work"], row["backend"], speed, *(others or (spread([x["ratio"] for x in each]), agreed)))


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = parser_of(__doc__, "models", rounds=5)
    parser.add_argument("--peers", metavar="NAME[=PYTHON],...", default="generator")
    parser.add_argument("--precisions", metavar="A,B", default="fp32,int4")
    parser.add_argument("--works", metavar="A,B", default=",".join(WORKS))
    parser.add_argument("--num-threads", metavar="N", type=int, default=1)
    given = parser.parse_args()
    asked = [*filter(None, given.peers.split(","))]
    pythons = {"ours": sys.executable}
    for pair in asked:
        name, _, python = pair.partition("=")
        pythons[name] = python or sys.executable
    works = {**WORKS, **TINY}
    for option, names, known in (("peers", list(pythons), BACKENDS), ("works", given.works.split(","), works)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{option}: {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = {name: works[name] for name in given.works.split(",")}
    vocab_size = json.loads((given.models / "hf" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    results = {}
    for precision in given.precisions.split(","):
        model = given.models / precision
        peers = {name: Peer(name, python, model, given.num_threads) for name, python in pythons.items()}
        results[precision] = measure(chosen, peers, vocab_size, given.rounds)
        for peer in peers.values():
            peer.close()
        write(given.output, given, results=results)
    heads = ("precision", "work", "backend", "tokens a second of the processor", "ours over it", "equal to ours")
    print(table(heads, [line for precision, rows in results.items() for line in lines(precision, rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
