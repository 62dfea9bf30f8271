"""The `rimuru` command on a tiny model with a vocabulary of words; once on the embedded model."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from typer.testing import CliRunner

from rimuru_jax import Engine, SamplingParams, cli
from rimuru_jax.cli import app, main
from rimuru_jax.cli.hotset import describe_skew
from rimuru_jax.cli.options import parse_bytes, sampling_options
from rimuru_jax.cli.prompts import read_prompts
from rimuru_jax.models.default_model import NAME, cache_dir
from tests.models.tiny_checkpoints import write_checkpoint

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    write_checkpoint(folder, "qwen3_moe", seed=5)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with the words w0 to w95 and a chat template."""
    folder = tmp_path_factory.mktemp("words") / "model"
    write_checkpoint(folder, "qwen3_moe", seed=5)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0")  # type: ignore[call-arg]
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: status, stdout, stderr."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return call


def outputs(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def words(ids: list[int]) -> str:
    """The text of an answer: this tokenizer sets every word off from what comes before it."""
    return "".join(f" w{i}" for i in ids)


def expected(model: Path, ids: list[int], max_tokens: int) -> list[int]:
    """What the engine itself answers greedily."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    [output] = Engine(model).generate([ids], params, use_tqdm=False)
    return output.outputs[0].token_ids


# generate ----------------------------------------------------------------------------------------------------------


def test_one_prompt_is_streamed_as_text(run, model):
    want = words(expected(model, [3, 4, 9], 6))
    assert run("generate", "w3 w4", "--model", model, "--max-tokens", 6)[:2] == (0, want + "\n")
    want = words(expected(model, [3, 4], 6))
    status, out, err = run("generate", "w3 w4", "--model", model, "--max-tokens", 6, "--no-chat-template")
    assert (status, out) == (0, want + "\n")
    last = err.splitlines()[-1]
    assert last.startswith("rimuru: 6 tokens, the first after ")
    assert last.endswith(" tokens/s after the first; 18 of 18 experts resident, 0 shrunk, 0 expanded")


def test_token_ids_need_no_tokenizer(run, bare):
    want = ",".join(map(str, expected(bare, [3, 4], 5)))
    assert run("generate", "--model", bare, "--prompt-token-ids", "3,4", "--max-tokens", 5)[:2] == (
        0,
        want + "\n",
    )
    status, _, err = run("generate", "w3", "--model", bare)
    assert status == 2 and "has no tokenizer.json" in err.splitlines()[-1]


def test_json_is_all_of_stdout(run, model, tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("w7 w8\n\nw5\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("w11\n"))
    options = ("--model", model, "--max-tokens", 4, "--no-chat-template", "--json", "--n", 2)
    status, out, _ = run("generate", "w3 w4", "-", "--file", file, "--prompt-token-ids", "2,3", *options)
    assert status == 0
    lines = outputs(out)
    assert [line.get("prompt") for line in lines] == ["w3 w4", "w11", None, "w7 w8", "w5"]
    assert [line["prompt_token_ids"] for line in lines] == [[3, 4], [11], [2, 3], [7, 8], [5]]
    for line in lines:
        assert [completion["index"] for completion in line["outputs"]] == [0, 1]
        for completion in line["outputs"]:
            assert completion["text"] == words(completion["token_ids"])
            ended = completion["finish_reason"] == "stop" or len(completion["token_ids"]) == 4
            assert ended
        metrics = line["metrics"]
        assert 0 <= metrics["time_in_queue"] <= metrics["time_to_first_token"]
        assert metrics["tokens_per_second"] > 0
        assert (metrics["resident_experts"], metrics["experts"]) == (18, 18)
        assert metrics["expert_shrinks"] == metrics["expert_expansions"] == 0
    assert lines[0]["outputs"][0]["token_ids"] == expected(model, [3, 4], 4)


def test_several_prompts_are_headed(run, model):
    options = ("--model", model, "--max-tokens", 3, "--no-chat-template", "--ignore-eos")
    status, out, err = run("generate", "w3 w4", "w5", *options)
    blocks = out.split("\n\n")
    assert status == 0
    assert [block.splitlines()[0] for block in blocks[:2]] == ["> w3 w4", "> w5"]
    assert [len(block.splitlines()[1].split()) for block in blocks[:2]] == [3, 3]
    assert err.splitlines()[-1].startswith("rimuru: 6 tokens, ")


def test_stop_and_sampling_reach_the_engine(run, model):
    options = ("--model", model, "--no-chat-template", "--max-tokens", 8, "--json", "--ignore-eos")
    found = outputs(run("generate", "w3 w4", *options)[1])[0]["outputs"][0]["text"].split()
    [line] = outputs(run("generate", "w3 w4", *options, "--stop", found[2])[1])
    assert line["outputs"][0]["finish_reason"] == "stop"
    assert line["outputs"][0]["text"].split() == found[: found.index(found[2])]

    def sampled(seed: int) -> list[int]:
        hot = ("--temperature", 5, "--seed", seed)
        return outputs(run("generate", "w3 w4", *options, *hot)[1])[0]["outputs"][0]["token_ids"]

    assert sampled(1) == sampled(1) != sampled(2)


def test_progress_stays_off_stdout_on_a_terminal(run, model, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    options = ("--model", model, "--max-tokens", 3, "--no-chat-template")
    status, out, _ = run("generate", "w3", "w4", *options, "--json")
    assert (status, len(outputs(out))) == (0, 2)
    status, out, err = run("generate", "w3", *options)
    assert status == 0 and "\x1b" not in out and "\x1b" in err


# What the user gets wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate"], "there is no prompt"),
        (["generate", "x", "--model", "/nowhere/at/all"], "/nowhere/at/all has no config.json"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "x", "--n", "0"], "n is 0"),
        (["generate", "x", "--memory-policy", "some"], "--memory-policy"),
        (["generate", "x", "--bogus"], "No such option: --bogus"),
        (["generate", "--prompt-token-ids", "1,two"], "'1,two'"),
        (["generate", "--file", "/nowhere.txt"], "/nowhere.txt: No such file or directory"),
        (["convert", "/nowhere/at/all", "/tmp/x"], "/nowhere/at/all has no config.json"),
        (["hotset", "record", "--output", "/nowhere/at/all.json"], "folder of /nowhere/at/all.json does not"),
        (["hotset", "record"], "--output"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_errors_are_one_sentence(run, arguments, said):
    status, out, err = run(*arguments)
    last = err.splitlines()[-1]
    assert (status, out) == (2, "")
    assert last.startswith("rimuru: error: ") and said in last
    assert "Traceback" not in err


def test_errors_after_loading(run, model):
    def said(*arguments: Any) -> str:
        status, out, err = run("generate", "w3", "--model", model, *arguments)
        assert (status, out) == (2, "")
        return err.splitlines()[-1]

    assert "max_num_seqs is 0" in said("--max-num-seqs", 0)
    assert "page_pool_bytes is 1024" in said("--page-pool-bytes", "1KiB")
    assert "hotset profile" in said("--expert-hotset-path", model / "config.json")
    assert "expert_offload_limit is 9" in said("--expert-offload-limit", 9)
    assert "token id 96" in said("--prompt-token-ids", "96")


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("RIMURU_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no prompt"):
        main(["generate"])


@pytest.mark.parametrize(
    ("installed", "driver", "platforms"),
    [
        ({"jax_cuda13_plugin"}, False, "cpu"),
        ({"jax_cuda13_plugin"}, True, None),  # with CUDA's libraries of the system
        ({"jax_cuda13_plugin", "nvidia", "nvidia.cudnn"}, False, None),  # JAX says what is wrong
        (set(), False, None),
    ],
)
def test_a_plugin_that_only_compiles_is_passed_over(run, monkeypatch, installed, driver, platforms):
    def load(name: str) -> None:
        if not driver:
            raise OSError(name)

    monkeypatch.setenv("JAX_PLATFORMS", "")  # so that it is as before in the end
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: name in installed)
    monkeypatch.setattr(cli.ctypes, "CDLL", load)
    assert run("--version")[0] == 0
    assert os.environ.get("JAX_PLATFORMS") == platforms


def test_version_and_help(run):
    import rimuru_jax.config

    assert run("--version")[:2] == (0, "rimuru_jax 0.1.0\n")
    assert "generate" in run()[1]
    text = CliRunner().invoke(app, ["generate", "--help"]).output
    fields = set(rimuru_jax.config.EngineConfig.__dataclass_fields__)
    assert {name for name in fields if f"--{name.replace('_', '-')} " not in text} == set()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("128", 128),
        ("128MiB", 2**27),
        ("2 GiB", 2**31),
        ("2GB", 2 * 10**9),
        ("1.5k", 1536),
        ("3t", 3 * 2**40),
    ],
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


def test_generation_config_gives_what_the_user_does_not(tmp_path):
    resolve = sampling_options(top_k=7)
    assert resolve(tmp_path).temperature == 0.0
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": 20}')
    params = resolve(tmp_path, n=3)
    assert (params.temperature, params.top_p, params.top_k, params.n) == (0.6, 0.9, 7, 3)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert resolve(tmp_path).temperature == 0.0


def test_read_prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a"\n{"prompt": "b", "note": 1}\n\n{"prompt_token_ids": [1]}\n{"messages": []}\n')
    want = [{"prompt": "a"}, {"prompt": "b"}, {"prompt_token_ids": [1]}, {"messages": []}]
    assert read_prompts(file) == want
    for wrong in ("{", "3", '{"text": "a"}', '{"prompt": "a", "messages": []}', '{"prompt": 3}', "\n"):
        file.write_text('"a"\n' + wrong if wrong.strip() else wrong)
        with pytest.raises(ValueError, match=r"line 2|no prompt"):
            read_prompts(file)


# chat --------------------------------------------------------------------------------------------------------------


def test_chat_remembers_until_reset(run, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("w3\n\nw4\n/nothing\n/reset\nw3\n/exit\nw5\n"))
    status, out, err = run("chat", "--model", model, "--max-tokens", 4, "--ignore-eos", "--system", "w20")
    first, second, third, *rest = out.split("\n")
    answer = expected(model, [20, 3, 9], 4)
    assert status == 0 and rest == [""]
    assert first == third == words(answer)
    assert second == words(expected(model, [20, 3, *answer, 4, 9], 4))
    assert "starting over" in err and "there is no /nothing" in err


def test_ctrl_c_ends_the_answer_and_not_the_chat(run, model, monkeypatch):
    step, steps = Engine.step, []

    def interrupted_step(engine):
        steps.append(engine)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted_step)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w3\nw4\n"))
    status, out, _ = run("chat", "--model", model, "--max-tokens", 6, "--ignore-eos")
    first, second, *_ = out.split("\n")
    assert status == 0
    assert len(first.split()) == 2 and len(second.split()) == 6  # of the third step nobody saw the token
    engine = steps[0]
    assert not engine.has_unfinished_requests()
    engine.allocator.check_ledger()


def test_a_turn_that_does_not_fit_does_not_end_the_chat(run, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("w3 " * 300 + "\nw3\n"))
    status, out, err = run("chat", "--model", model, "--max-tokens", 3, "--ignore-eos")
    assert (status, len(out.split())) == (0, 3)
    assert "rimuru: error: the prompt has 301 tokens" in err


def test_chat_needs_a_template(run, bare):
    status, _, err = run("chat", "--model", bare)
    assert status == 2 and "no tokenizer.json" in err


# convert, hotset, plan ---------------------------------------------------------------------------------------------


def test_convert_then_serve(run, bare, tmp_path):
    target = tmp_path / "packed"
    status, out, err = run("convert", bare, target)
    assert (status, out) == (0, "") and "packed holds" in err
    assert "already held" in run("convert", bare, target)[2]
    options = ("--prompt-token-ids", "3,4", "--max-tokens", 5)
    assert run("generate", "--model", target, *options)[:2] == run("generate", "--model", bare, *options)[:2]
    assert "a packed checkpoint already" in run("convert", target, tmp_path / "again")[2]


def test_hotset_record(run, bare, tmp_path):
    prompts, profile = tmp_path / "code.jsonl", tmp_path / "profile.json"
    prompts.write_text('{"prompt_token_ids": [3, 4, 5]}\n{"prompt_token_ids": [6]}\n')
    options = ("--max-tokens", 4, "--ignore-eos")
    status, out, err = run(
        "hotset", "record", "--model", bare, "--prompts", prompts, "--output", profile, *options
    )
    assert (status, out) == (0, "") and "the hottest 2 of 6 experts get" in err
    content = json.loads(profile.read_text())
    # The last token of each answer is never computed.
    tokens = 3 + 1 + 2 * (4 - 1)
    assert (content["tokens"], content["data"]) == (tokens, "code.jsonl")
    assert np.array(content["counts"]).sum(axis=1).tolist() == [2 * tokens] * 3
    options = ("--prompt-token-ids", "3,4", "--max-tokens", 3, "--expert-hotset-path", profile)
    assert run("generate", "--model", bare, *options)[0] == 0


def test_bench_counts_what_it_was_asked_for(run, bare, tmp_path):
    arguments = (
        "--load-format",
        "dummy",
        "--page-pool-bytes",
        "1MiB",
        "--max-model-len",
        "64",
        "--model",
        bare,
    )
    written = tmp_path / "latency.json"
    lengths = ("--input-len", 5, "--output-len", 6, "--batch-size", 2, "--num-iters", 2)
    status, out, _ = run("bench", "latency", *lengths, "--output-json", written, *arguments)
    result = json.loads(out)
    assert status == 0 and json.loads(written.read_text()) == result
    assert len(result["latencies"]) == 2 and min(result["latencies"]) <= result["avg_latency"]
    assert 0 < result["decode_step_ms"]["50"] < 1e3 * max(result["latencies"])

    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,5,3\n1,9,6\n2,8,2\n")
    asked = ("bench", "throughput", "--dataset-path", trace, *arguments)
    status, out, _ = run(*asked, "--num-prompts", 2)
    result = json.loads(out)
    assert status == 0 and result["num_requests"] == 2 and result["total_num_tokens"] == 5 + 3 + 9 + 6
    assert result["output_tokens_per_second"] == pytest.approx(9 / result["elapsed_time"])
    assert result["num_steps"] >= 6
    status, _, err = run(*asked, "--num-prompts", 4)
    assert status == 2 and "has 3 requests, but num_prompts is 4" in err
    trace.write_text("a,b\n1,2\n")
    status, _, err = run(*asked)
    assert status == 2 and "trace.csv is no trace: wanted CSV with input_tokens" in err
    for command, option in (
        ("latency", "batch-size"),
        ("latency", "num-iters"),
        ("throughput", "num-prompts"),
    ):
        status, _, err = run("bench", command, f"--{option}", 0, *arguments)
        assert status == 2 and f"{option.replace('-', '_')} is 0, it must be at least 1" in err
    status, _, err = run("bench", "latency", "--input-len", 10**12, *arguments)
    assert status == 2 and "8 of 8 requests are longer than max_model_len" in err


def test_skew_by_hand():
    # Quarters of two experts: 4 of 8 in the first layer, 9 of 10 in the second.
    counts = np.array([[1, 2, 1, 0, 2, 1, 1, 0], [0, 0, 4, 1, 5, 0, 0, 0]])
    text = describe_skew(counts)
    assert "hottest 2 of 8 experts get 70.0%" in text and "(50.0% to 90.0%; uniform: 25.0%)" in text


@pytest.mark.parametrize("policy", ["fixed", "elastic"])
def test_plan_foretells_the_engine(run, bare, policy):
    pool, settings = 96 * 1024, {"memory_policy": policy, "max_model_len": 64}
    options = ("--page-pool-bytes", pool, "--memory-policy", policy, "--max-model-len", 64, "--json")
    [row] = json.loads(run("plan", bare, *options)[1])["pools"]
    engine = Engine(bare, page_pool_bytes=pool, **settings)
    assert row["resident_experts_at_start"] == int(engine.experts.resident.sum())
    assert row["expert_offload_limit"] == engine.plan.expert_offload_limit
    assert row["pool_bytes"] == engine.loop.pool.nbytes
    params = dict(engine.loop.params)
    del params["embedding"]  # not tied, so that a GPU reads its rows from the host
    assert row["device_bytes"] - row["pool_bytes"] == sum(array.nbytes for array in jax.tree.leaves(params))


# The process -------------------------------------------------------------------------------------------------------

# What runs in the background of a script ignores Ctrl-C, and so would its children. (The child's own code takes it
# back: `preexec_fn` would fork this process, of which JAX warns.)
COMMAND = [
    sys.executable,
    "-c",
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from rimuru_jax.cli import main; sys.exit(main())",
]


def test_ctrl_c_is_quiet(tmp_path):
    write_checkpoint(tmp_path / "model", "qwen3_moe", max_position_embeddings=1 << 16)
    # An answer of some tokens would be complete before the signal comes.
    options = ["--prompt-token-ids", "3,4", "--ignore-eos", "--max-tokens", "60000"]
    process = subprocess.Popen(
        [*COMMAND, "generate", "--model", str(tmp_path / "model"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


def test_closed_pipe_is_quiet():
    config = Path(__file__).parent / "data" / "configs" / "Qwen3-30B-A3B.json"
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [*COMMAND, "plan", str(config)], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (1, "")


@pytest.mark.skipif(
    not ((cache_dir() / NAME).is_dir() or importlib.util.find_spec("gguf")),
    reason="the demo extra is not installed",
)
def test_the_embedded_model_answers(run):
    status, out, err = run("generate", "What is the capital of France?", "--max-tokens", 16)
    assert status == 0 and "Paris" in out
    assert "of 480 experts resident" in err
