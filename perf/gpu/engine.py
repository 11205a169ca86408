"""Measure the engine on a GPU, on models with real shapes and random weights, and compare it with target values.

    python perf/gpu/engine.py all
    python perf/gpu/engine.py stream gaps
    python perf/gpu/engine.py all --device cpu --tiny

The models are Qwen3-8B ("8B", in bf16 and in 4 bits), Qwen3.5-27B ("27B", with Gated DeltaNet layers, in 4 bits) and
Qwen3-30B-A3B ("30B-A3B", in 4 bits). The commands are:

- `stream`: decode rate of one stream of each model, from a context of 1,024 tokens. `ceiling_tok_s` is the decode rate
  that memory bandwidth permits: the measured copy bandwidth divided by the bytes that a step reads.
- `streams`: total rate of 512 concurrent streams of 8B in bf16, with 128 prompt tokens and 128 or 1,024 output tokens.
- `prefill`: prefill rate of a prompt of 8,192 tokens on 8B, relative to the measured rate of a large matrix product.
- `gaps`: p99 / median of the time between tokens of 16 streams of 8B, while a prompt of 8,192 tokens arrives every two
  seconds.
- `host`: share of a step of 64 streams of 8B in which the host does not wait for the GPU.
- `load`: load time of an 8B checkpoint in safetensors, relative to the time of reading the same files. `--folder`
  selects the folder of the checkpoint.
- `first`: time from the start of a process to its first token, with the checkpoint of `load`. The process starts twice;
  the second start counts.

Every line is JSON and has the target value of the measurement (`bar_...`). The measured steps include scheduler and
sampler, as in an engine process, but no HTTP.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

COMMANDS = ("stream", "streams", "prefill", "gaps", "host", "load", "first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", choices=["all", *COMMANDS, "one-token"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that the script works")
    parser.add_argument("--folder", type=Path, help="where the checkpoint of `load` and `first` is written, and kept")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    commands = COMMANDS if "all" in arguments.commands else arguments.commands
    with ExitStack() as stack:
        if arguments.folder is None:
            arguments.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(arguments.device, arguments.tiny, arguments.folder)
        if commands == ["one-token"]:
            bench.one_token()
            return
        for command in commands:
            with where_it_fits(command):
                getattr(bench, command)()


class Bench:
    """The measurements on one GPU. Each public method is a command of the script (see the module)."""

    def __init__(self, device: str, tiny: bool, folder: Path) -> None:
        import torch
        from gpu_support import timing

        from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import usable_device

        self._tiny, self._folder, self._name = tiny, folder, device
        self._device = usable_device(device)
        narrow = device == "cpu" or torch.cuda.get_device_capability(self._device) < (8, 0)
        self._dtype = torch.float16 if narrow else torch.bfloat16  # Triton's interpreter computes bfloat16 wrongly
        self._copies: Callable[[], float] = lambda: timing.copy_bandwidth(self._device, 1 << (16 if tiny else 30))
        self._products: Callable[[], float] = lambda: timing.matmul_rate(
            self._device, self._dtype, 64 if tiny else 8192
        )

    def stream(self) -> None:
        """Measure the decode rate of one stream of each model."""
        copies = self._copies()
        for model, quant, threshold in (
            ("8B", "", 250),
            ("8B", "q4k", 600),
            ("27B", "q4k", 200),
            ("30B-A3B", "q4k", 500),
        ):
            with where_it_fits("stream", model, quant):
                self._stream(model, quant, threshold, copies)

    def _stream(self, model: str, quant: str, threshold: int, copies: float) -> None:
        context, steps = (8, 2) if self._tiny else (1024, 256)
        engine = self._engine(model, quant)
        rate = engine.decode(1, context, steps)
        facts = engine.runner.facts
        read = facts.step_bytes + (context + steps // 2) * facts.token_bytes + 2 * facts.state_bytes
        figures = {
            "tok_s": rate,
            "ceiling_tok_s": copies / read,
            "threshold_tok_s": threshold,
            "gb_s": rate * read / 1e9,
        }
        report("stream", model, quant, **figures, copy_gb_s=copies / 1e9, of_copies=rate * read / copies)

    def streams(self) -> None:
        """Measure the total rate of 512 concurrent streams, from the start of prefill to the end of all streams."""
        for length, threshold in ((128, 15_000), (1024, 16_000)):
            count, prompt, length = (2, 4, 3) if self._tiny else (512, 128, length)
            engine = self._engine("8B", "", max_sequences=count, max_waiting=count, max_prefill_beside_decode=2048)
            engine.add(count, prompt, length)
            begin = time.perf_counter()
            engine.run()
            seconds = time.perf_counter() - begin
            report(
                "streams",
                "8B",
                "",
                streams=count,
                out=length,
                tok_s=count * length / seconds,
                threshold_tok_s=threshold,
            )

    def prefill(self) -> None:
        """Measure the prefill rate of a long prompt."""
        length = 32 if self._tiny else 8192
        products = self._products()
        engine = self._engine("8B", "", max_step_tokens=length)
        engine.add(1, length, 1)
        engine.run()
        engine.add(1, length, 1)
        begin = time.perf_counter()
        engine.run()
        rate = length / (time.perf_counter() - begin)
        settings = engine.config
        head = settings["vocab_size"] * settings["hidden_size"]
        wide = settings["num_attention_heads"] * settings["head_dim"] * settings["num_hidden_layers"]
        work = 2 * (engine.runner.facts.parameters - 2 * head) + 2 * wide * length  # K and V, half of the positions
        share = rate * work / products
        report("prefill", "8B", "", tokens=length, tok_s=rate, tflop_s=rate * work / 1e12, share=share, bar_share=0.55)

    def gaps(self) -> None:
        """Measure the times between tokens of decoding streams while long prompts arrive."""
        streams, prompt, every, seconds = (2, 24, 0.5, 2.0) if self._tiny else (16, 8192, 2.0, 60.0)
        as_in_nodes = {"max_step_tokens": 2048, "max_prefill_beside_decode": 2048}
        engine = self._engine("8B", "", max_sequences=2 * streams, context_length=32768, **as_in_nodes)
        first = engine.add(streams, 16, 1 << 20)
        engine.until_decoding(streams)
        begin = last = time.perf_counter()
        arrived, gaps, last_seen = 0, list[float](), dict.fromkeys(first, last)
        while last < begin + seconds:
            if last - begin >= arrived * every:
                arrived += 1
                engine.add(1, prompt, 1)
            outputs = engine.step()
            last = time.perf_counter()
            for output in outputs:
                if output.id in last_seen:
                    gaps.append(last - last_seen[output.id])
                    last_seen[output.id] = last
        gaps.sort()
        median, p99 = statistics.median(gaps), gaps[int(0.99 * len(gaps))]
        figures = {"median_ms": 1e3 * median, "p99_ms": 1e3 * p99, "ratio": p99 / median, "bar_ratio": 2.5}
        report("gaps", "8B", "", prompts=arrived, **figures)

    def host(self) -> None:
        """Measure the share of a step's time in which the host computes instead of waiting for the GPU."""
        from helexa.neuron.engine.step_output_logprobs_and_pooling import Readback

        streams, steps = (2, 2) if self._tiny else (64, 200)
        engine = self._engine("8B", "", max_sequences=streams)
        engine.add(streams, 16, 1 << 20)
        engine.until_decoding(streams)
        waited, wait = 0.0, Readback.wait

        def timed(readback: Readback) -> Any:
            nonlocal waited
            begin = time.perf_counter()
            result = wait(readback)
            waited += time.perf_counter() - begin
            return result

        with mock.patch.object(Readback, "wait", timed):
            begin = time.perf_counter()
            for _ in range(steps):
                engine.step()
            seconds = time.perf_counter() - begin
        busy = seconds - waited
        figures = {"step_ms": 1e3 * seconds / steps, "host_ms": 1e3 * busy / steps}
        report("host", "8B", "", **figures, share=busy / seconds, bar_share=0.2)

    def load(self) -> None:
        """Measure the load time of a checkpoint that is not in the page cache."""
        from helexa.neuron.engine.ipc.engine_options import EngineOptions
        from helexa.neuron.engine.loading.load import load

        self._write()
        files = sorted(self._folder.glob("*.safetensors"))
        total = sum(file.stat().st_size for file in files)
        forget(files)
        begin = time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as data:
                while data.read(1 << 24):
                    pass
        disk = total / (time.perf_counter() - begin)
        forget(files)
        self._free()
        begin = time.perf_counter()
        load(self._folder, EngineOptions(device=self._name, dtype=dtype_name(self._dtype), kernels="triton"))
        rate = total / (time.perf_counter() - begin)
        report("load", "8B", "", gb_s=rate / 1e9, disk_gb_s=disk / 1e9, share=rate / disk, bar_share=0.6)

    def first(self) -> None:
        """Measure the time from the start of a process to its first token."""
        self._write()
        self._free()
        command = [sys.executable, __file__, "one-token", "--device", self._name, "--folder", str(self._folder)]
        command += ["--tiny"] if self._tiny else []
        seconds = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            subprocess.run(command, check=True)
            seconds = time.perf_counter() - begin
        report("first", "8B", "", seconds=seconds, bar_seconds=8)

    def one_token(self) -> None:
        """Load the checkpoint and generate one token. The command `first` runs this method in a new process."""
        Engine(self._folder, self._options(""), {}).decode(1, 8, 1)

    def _write(self) -> None:
        from gpu_support.random_models import RandomModel

        if not (self._folder / "config.json").exists():
            RandomModel(self._configs()["8B"]).write(self._folder)

    def _configs(self) -> dict[str, dict[str, Any]]:
        from gpu_support.random_models import CONFIGS, TINY

        return TINY if self._tiny else CONFIGS

    def _options(self, quant: str, **options: int) -> Any:
        from helexa.neuron.engine.ipc.engine_options import EngineOptions

        tiny: dict[str, int] = {"kv_cache_mb": 8, "max_sequences": 4, "snapshot_mb": 1} if self._tiny else {}
        if not self._tiny:
            options = {"max_step_tokens": 8192, "context_length": 10240, **options}
        wanted: dict[str, Any] = {"device": self._name, "dtype": dtype_name(self._dtype), "quant": quant}
        wanted |= tiny | options
        return EngineOptions(**wanted, kernels="triton", speculation=False, prefix_reuse="off")

    def _free(self) -> None:
        """Release the previous model's GPU memory, which torch keeps in its memory cache."""
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()

    def _engine(self, model: str, quant: str, **options: int) -> "Engine":
        self._free()
        return Engine(None, self._options(quant, **options), self._configs()[model])


class Engine:
    """A loaded model with a scheduler in this process. It works like an engine process, but without IPC.

    Args:
        folder: folder of a checkpoint, or None for a model with random weights.
        options: options of the engine.
        config: model configuration, used if `folder` is None.
    """

    def __init__(self, folder: Path | None, options: Any, config: dict[str, Any]) -> None:
        import msgspec
        from gpu_support.random_models import RandomModel

        from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
        from helexa.neuron.engine.loading import load
        from helexa.neuron.engine.loop import Steps
        from helexa.neuron.engine.scheduling.scheduler import Scheduler
        from helexa.neuron.ops.kernel_header import PAGE_SIZE

        self.config = config
        if folder is None:
            checkpoint = RandomModel(config)
            with mock.patch.object(load, "open_checkpoint", lambda path: checkpoint):
                self.runner = load.load_once(Path("made"), options)
        else:
            self.runner = load.load_once(folder, options)
        if self.runner.ops.name != options.kernels:
            raise SystemExit("there are no kernels for this device, only plain torch; `neuron doctor` says why")
        self.runner.warm_up()
        facts = self.runner.facts
        options = msgspec.structs.replace(
            options, context_length=facts.context_length, max_sequences=facts.max_sequences
        )
        pages = PagePool(facts.kv_pages, PAGE_SIZE)
        states = StatePool(facts.max_sequences, facts.snapshots) if facts.state_bytes else None
        self._scheduler = Scheduler(options, pages, states)
        self._steps = Steps(self.runner, self._scheduler, overlap=self.runner.device.type == "cuda")
        self._next = 0

    def add(self, count: int, prompt: int, tokens: int) -> range:
        """Add greedy requests with different prompts and return their ids.

        Args:
            count: number of requests.
            prompt: number of prompt tokens of each request.
            tokens: number of output tokens of each request.
        """
        from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
        from helexa.neuron.engine.scheduling.sequence import Sequence

        ids = range(self._next, self._next + count)
        self._next = ids.stop
        for number in ids:
            known = [(7919 * number + 31 * place) % 200 for place in range(prompt)]
            request = Generate(id=number, prompt=known, max_tokens=tokens, sampling=SamplingParams(temperature=0))
            rejection = self._scheduler.add(Sequence(request))
            if rejection is not None:
                raise SystemExit(rejection.error)
        return ids

    def step(self) -> list[Any]:
        """Run one engine step and return its outputs. Exit if one of the outputs is an error."""
        outputs = self._steps.advance()
        for output in outputs:
            if output.finish == "error":
                raise SystemExit(output.error)
        return outputs

    def run(self) -> None:
        """Run engine steps until all requests have ended."""
        while not self._steps.idle:
            self.step()

    def until_decoding(self, streams: int) -> None:
        """Run engine steps until each of `streams` requests has at least three output tokens."""
        brought = dict[int, int]()
        while len(brought) < streams or min(brought.values()) < 3:
            for output in self.step():
                brought[output.id] = brought.get(output.id, 0) + len(output.tokens)

    def decode(self, streams: int, context: int, steps: int) -> float:
        """Return the decode rate in tokens per second, summed over all streams.

        Args:
            streams: number of streams.
            context: number of prompt tokens of each stream.
            steps: number of measured tokens of each stream.
        """
        ids = self.add(streams, context, steps + 3)
        self.until_decoding(streams)
        begin, count = time.perf_counter(), 0
        while not self._steps.idle:
            count += sum(len(output.tokens) for output in self.step() if output.id in ids)
        return count / (time.perf_counter() - begin)


def forget(files: list[Path]) -> None:
    """Remove the files from the operating system's page cache."""
    for file in files:
        with file.open("rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def where_it_fits(command: str, model: str = "8B", quant: str = "") -> Iterator[None]:
    """Print a JSON line instead of failing if the model in the `with` block does not fit into the GPU's memory."""
    from helexa.core.errors import DoesNotFitError

    try:
        yield
    except DoesNotFitError as error:
        line = {"command": command, "model": model, "quant": quant or "16 bits", "left_out": str(error)}
        print(json.dumps(line), flush=True)


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def report(command: str, model: str, quant: str, **figures: float) -> None:
    """Print the JSON line with the results of a command for one model."""
    shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"command": command, "model": model, "quant": quant or "16 bits", **shown}), flush=True)


if __name__ == "__main__":
    main()
