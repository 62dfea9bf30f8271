"""The engine: a model in one page pool, requests in, tokens out.

Wires the host (scheduler, allocator, expert cache) to the device (serving loop, sampler). One `step` is: plan, hand
over what changed, start the model, deliver the tokens of the step before, start the choice of tokens. So the device
has a step to run while the host plans the next; tokens go from step to step on the device:

    host     plan 2, run 2 | deliver 1, sample 2 | plan 3, run 3 | deliver 2, sample 3 | ...
    device   model 1, sample 1 | model 2                         , sample 2 | model 3 ...

When tokens are chosen all before them are known, which penalties and grammars want. A request whose end only its token
tells is in the next step by then; what comes out there is dropped.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from rimuru_jax.array_types import RouterCounts
from rimuru_jax.config import EngineConfig
from rimuru_jax.controller import HostController, hotset_profile, plan_for
from rimuru_jax.host.expert_cache import HOST
from rimuru_jax.host.hotset import HotsetProfile
from rimuru_jax.host.prefetch import loads_ahead
from rimuru_jax.host.request import Request
from rimuru_jax.host.scheduler import StepPlan
from rimuru_jax.models.checkpoint import LoadedModel
from rimuru_jax.models.context import PackedBatch
from rimuru_jax.models.default_model import DEFAULT_POOL_BYTES, cache_dir, default_model_path
from rimuru_jax.models.random_weights import skewed
from rimuru_jax.models.registry import parse_config, read_config
from rimuru_jax.models.stack import stack_params
from rimuru_jax.outputs import FinishReason, Logprob, RequestOutput
from rimuru_jax.prompt_logprobs import PromptPart, prompt_parts
from rimuru_jax.request_state import Completion, Prompt, RequestState, token_logprobs
from rimuru_jax.sampling import SampledTokens, SamplingRow
from rimuru_jax.sampling_params import SamplingParams
from rimuru_jax.sampling_table import SamplingTable
from rimuru_jax.serving_loop import IN_FLIGHT, Bucket, ServingLoop, StepOutputs, buckets, pack_rows
from rimuru_jax.start_up import (
    LoadProgress,
    check_dtype,
    find_budget,
    load_model,
    model_spec,
    on_gpu,
    use_compilation_cache,
)
from rimuru_jax.step_costs import measure_step_costs
from rimuru_jax.structured_output import GrammarCompiler
from rimuru_jax.tokenizer import (
    IncrementalDetokenizer,
    Tokenizer,
    load_tokenizer,
    read_eos_token_ids,
    require_tokenizer,
)

logger = logging.getLogger(__name__)

RECONFIGURABLE = frozenset(
    {
        "adjuster_policy",
        "expand_patience",
        "expert_cache_policy",
        "expert_hotset_path",
        "expert_offload_limit",
        "expert_prefetch",
        "loading_buffer_experts",
        "memory_policy",
        "page_pool_bytes",
        "scheduling_policy",
    }
)
"""Fields of `EngineConfig` that only the host looks at."""


class _RunningStep(NamedTuple):
    """A step that the device has been given, and what its delivery needs to know."""

    plan: StepPlan
    sampled: SampledTokens
    router_counts: RouterCounts
    prompt_logprobs: list[PromptPart]
    in_pool: np.ndarray
    """bool[L, E]: experts that the step finds in the pool, loading buffers included."""
    buffered: np.ndarray
    """bool[L, E]: those in loading buffers."""


class Engine:
    """Serves one model.

    Args:
        model: a Hugging Face or packed model folder (or a config.json, for dummy weights); a model in memory (see `models.hybrid`), whose parameters are
            taken out of it; None: the embedded default model.
        progress: called while the model is built and loaded.
        config: fields of `EngineConfig`.

    Raises ValueError in one sentence for anything that cannot work, before weights are loaded wherever possible.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        *,
        progress: LoadProgress | None = None,
        **config: Any,
    ):
        self.config = _engine_config(config)
        report = progress or (lambda fraction, text: None)
        folder = None
        if isinstance(model, LoadedModel):
            self.model_config = model.config
            check_dtype(model, self.config.dtype)
        elif not isinstance(model, str | Path | None):
            raise ValueError(
                f"model is a {type(model).__name__}, it must be a folder or a model in memory "
                "(of a ModelConfig, models.hybrid.random_model makes one)"
            )
        else:
            folder = default_model_path(report) if model is None else Path(model)
            self.model_config = parse_config(read_config(folder))
            if self.config.load_format == "dummy":
                self.model_config = skewed(self.model_config, self.config.dummy_router_skew)
        tokenizer_folder = self.config.tokenizer or folder
        self.tokenizer_folder = Path(tokenizer_folder) if tokenizer_folder else None
        self.tokenizer = load_tokenizer(self.tokenizer_folder) if self.tokenizer_folder else None
        self._eos_token_ids = read_eos_token_ids(folder) if folder else self.model_config.eos_token_ids
        self.grammars = GrammarCompiler(
            self.tokenizer, self.tokenizer_folder, self.model_config.vocab_size, self._eos_token_ids
        )
        use_compilation_cache()
        fallback = DEFAULT_POOL_BYTES if model is None else None
        report(0.0, "measuring memory")
        self.memory_budget = find_budget(self.model_config, self.config) if fallback is None else None
        """What the pool's size follows from; None where it is given, and on a CPU."""
        if self.memory_budget is not None:
            fallback = self.memory_budget.pool_bytes
        self.plan = plan_for(self.model_config, self.config, fallback)
        logger.info("page pool:\n%s", self.plan.describe())
        profile = hotset_profile(self.model_config, self.config.expert_hotset_path)
        loaded = model
        if folder is not None:
            loaded = load_model(folder, self.model_config, self.config, report)
        assert isinstance(loaded, LoadedModel)
        report(1.0, "placing experts")
        given = self.config.compile_ahead
        self._compiled_ahead = on_gpu() if given is None else given
        self.loop = ServingLoop(
            model_spec(self.model_config, self.config, self.plan.layout),
            stack_params(self.model_config, loaded.params),
            loaded.host_pages,
            self.plan.layout,
            num_huge_pages=self.plan.num_huge_pages,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.plan.max_model_len,
            cache=cache_dir() / "steps" if on_gpu() else None,
        )
        if self._compiled_ahead:
            shapes = list(buckets(self.config.max_num_batched_tokens, self.config.max_num_seqs))
            self.loop.warm_up(shapes, report)
        self._take_control(profile)
        self._states: dict[str, RequestState] = {}
        self._completions: dict[Request, tuple[RequestState, Completion]] = {}
        self._arrivals = itertools.count()
        self._unreported: dict[str, RequestState] = {}
        """Requests that ended outside of a step's normal course: the next `step` reports them."""

    def _take_control(self, profile: HotsetProfile) -> None:
        """Give the loop's pool to a controller for the present arguments, and place experts in it."""
        config, plan = self.config, self.plan
        costs, weighs = None, config.memory_policy == "elastic" and config.adjuster_policy == "throughput"
        if weighs and self._compiled_ahead and on_gpu():
            costs = measure_step_costs(self.loop, config, plan, profile.token_chances())
        host = HostController.build(self.model_config, config, plan, profile)
        self.allocator, self._page_tables, self.experts = host.allocator, host.page_tables, host.experts
        self.scheduler, self.metrics = host.scheduler, host.metrics
        self.scheduler.step_costs = costs
        self.loop.copy_experts(self.experts.fill(plan.pages_kept_free))
        self._shown_experts = -1
        self._places: dict[bool, tuple[np.ndarray, np.ndarray]] = {}
        """bool[L, E] twice, by whether a step loads ahead: experts that it finds in the pool, and those in buffers."""
        self._running: _RunningStep | None = None
        """The step that the device was given last, whose tokens have not been delivered."""
        self.seconds_waited: float | None = None
        """How long the newest `step` waited for the step before it; 0.0: that was done already; None: there was none."""
        self._sampling = SamplingTable(config.max_num_seqs, self.model_config.vocab_size)
        self.router_counts = np.zeros(self.experts.resident.shape, np.int64)
        """How many tokens chose each expert of each MoE layer since the start, or since `reconfigure`."""
        self.num_routed_tokens = 0

    def reconfigure(self, **changes: Any) -> None:
        """Serve on under other policies, with the same weights and compiled steps: to compare them in one process.

        Args:
            changes: fields of `EngineConfig` that only the host looks at (`RECONFIGURABLE`). `page_pool_bytes` may be
                less than the pool is, of which the rest is then left alone. Metrics start anew.

        Raises ValueError in one sentence, with nothing changed, for other fields, for values that cannot work, and while
        requests are unfinished.
        """
        if fixed := sorted(set(changes) - RECONFIGURABLE):
            raise ValueError(
                f"{', '.join(fixed)} cannot change in a running engine, make a new one; what can: "
                f"{', '.join(sorted(RECONFIGURABLE))}"
            )
        if self.has_unfinished_requests():
            raise ValueError(
                f"{len(self._states)} requests are unfinished: let them end, or abort them first"
            )
        config = dataclasses.replace(self.config, **changes)
        pool_bytes, limit = self.loop.pool.nbytes, self.loop.max_model_len
        plan = plan_for(
            self.model_config,
            dataclasses.replace(config, max_model_len=min(config.max_model_len or limit, limit)),
            pool_bytes,
        )
        if plan.pool_bytes > pool_bytes:
            raise ValueError(f"page_pool_bytes is {config.page_pool_bytes}, but the pool has {pool_bytes}")
        profile = hotset_profile(self.model_config, config.expert_hotset_path)
        self.config, self.plan = config, plan
        self._take_control(profile)

    # Requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request. Raises ValueError in one sentence, with nothing queued, when it cannot be served.

        `arrival_time`, on the clock of `time.monotonic`, is for its metrics if it came earlier than now.
        """
        if request_id in self._states:
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request")
        params = sampling_params or SamplingParams()
        text, ids = self._tokenize(prompt, params)
        limit = self.plan.max_model_len
        if len(ids) >= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but max_model_len is {limit} and must leave room for one more"
            )
        state = RequestState(request_id, text, ids)
        if arrival_time is not None:
            state.metrics.arrival_time = arrival_time
        if params.prompt_logprobs is not None:
            state.prompt_logprobs = list[dict[int, Logprob] | None]([None] * len(ids))
        array = np.asarray(ids, np.int32)
        stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and params.allowed_token_ids and stops.issuperset(params.allowed_token_ids):
            raise ValueError(
                f"allowed_token_ids has nothing but tokens that end the output, which min_tokens "
                f"({params.min_tokens}) forbids; allow others or set min_tokens to 0"
            )
        for index in range(params.n):
            arrival = next(self._arrivals)
            request = Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                prompt_token_ids=ids,
                max_tokens=params.max_tokens or limit,
                priority=priority,
                arrival=arrival,
            )
            seed = (self.config.seed << 32) + arrival if params.seed is None else params.seed + index
            grammar = self.grammars.compile(params.structured_outputs) if params.structured_outputs else None
            completion = Completion(
                index=index,
                request=request,
                seed=seed,
                params=params,
                stop_token_ids=stops,
                detokenizer=self._detokenizer(params, ids),
                prompt_array=array,
                most_tokens=request.length_limit(limit) - len(ids),
                grammar=grammar,
            )
            try:
                self.scheduler.add(request)
            except ValueError:
                for queued in state.completions:
                    self._forget(queued.request)
                    self.scheduler.finish(queued.request, "abort")
                raise
            state.completions.append(completion)
            self._completions[request] = (state, completion)
        self._states[request_id] = state

    def abort(self, request_id: str) -> bool:
        """End a request in whatever phase it is, returning all its pages; False when there is no such request."""
        state = self._states.pop(request_id, None)
        if state is None:
            return False
        for completion in state.completions:
            if not completion.request.finished:
                self._end(completion, "abort")
        self._unreported[request_id] = state
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._states or self._unreported)

    def device_busy(self) -> bool:
        """Whether the device has yet to end the step that it was given last."""
        return self._running is not None and not self._running.sampled.token_ids.is_ready()  # type: ignore[attr-defined]

    def _tokenize(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        text = None
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            elif isinstance(prompt.get("prompt"), str):
                prompt = prompt["prompt"]
            else:
                raise ValueError(
                    f"a prompt dictionary has the keys {sorted(map(str, prompt))}, it must have 'prompt_token_ids' or 'prompt'"
                )
        if isinstance(prompt, str):
            text = prompt
            ids = require_tokenizer(self.tokenizer, self.tokenizer_folder).encode(prompt)
        else:
            ids = _token_ids(prompt)
        if not ids:
            raise ValueError("the prompt is empty, it must have at least one token")
        vocab_size = self.model_config.vocab_size
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise ValueError(
                f"prompt token id {wrong} is outside the vocabulary of {vocab_size} tokens (0 to {vocab_size - 1})"
            )
        params.validate_for_vocab(vocab_size)
        if params.stop:
            require_tokenizer(self.tokenizer, self.tokenizer_folder)
        return text, ids

    def _detokenizer(self, params: SamplingParams, prompt_ids: list[int]) -> IncrementalDetokenizer | None:
        if not params.detokenize or self.tokenizer is None:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            prompt_token_ids=prompt_ids,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    # The step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Start one step and wait for the one before; return every request that got a token or ended, as it now stands."""
        return [state.output() for state in self._advance()]

    def _advance(self) -> list[RequestState]:
        """`step`, without the outputs of requests."""
        changed, self._unreported = self._unreported, {}
        self.seconds_waited = None
        plan = self.scheduler.schedule()
        self.loop.update_tables(self._page_tables.take_updates())
        for request in plan.rejected:
            state, completion = self._forget(request)
            completion.close()
            changed[state.request_id] = state
            if state.finished:
                self._states.pop(state.request_id, None)
        self.loop.move_experts(plan.page_moves)
        copies = plan.expert_swaps + plan.expert_copies
        self.loop.copy_experts(copies)
        self.metrics.add("expert_pages_loaded", len(copies) * self.experts.matrices)
        if self._shown_experts != self.experts.version:
            self._shown_experts = self.experts.version
            pages, loads = self.experts.step_tables()
            self.loop.set_experts(pages, loads, self.experts.buffer_pages)
            in_pool, resident = pages[:, :, 0] != HOST, self.experts.resident.copy()
            self._places = {True: (in_pool, in_pool & ~resident), False: (resident, np.zeros_like(resident))}
        ahead = loads_ahead(self.config.expert_prefetch, plan.num_tokens, self.experts.load_chances())
        outputs, slots = None, [chunk.request.slot for chunk in plan.chunks]
        if plan.chunks:
            outputs = self.loop.run(self._pack(plan, slots), loads_ahead=ahead)
        if self._running is not None:
            self._deliver(self._running, changed)
        self._running = self._sample(plan, slots, outputs, ahead) if outputs is not None else None
        return list(changed.values())

    def _sample(
        self, plan: StepPlan, slots: list[int], outputs: StepOutputs, loads_ahead: bool
    ) -> "_RunningStep":
        """Start the choice of a step's tokens, all tokens before which are known by now."""
        in_pool, buffered = self._places[loads_ahead]
        step = _RunningStep(
            plan=plan,
            sampled=self._choose(plan, np.array(slots), outputs),
            router_counts=outputs.router_counts,
            prompt_logprobs=list(prompt_parts(self.loop, plan, outputs, self._completions)),
            in_pool=in_pool,
            buffered=buffered,
        )
        for array in jax.tree.leaves((step.sampled, step.router_counts)):
            array.copy_to_host_async()
        return step

    def _choose(self, plan: StepPlan, slots: np.ndarray, outputs: StepOutputs) -> SampledTokens:
        """Start the sampler for what the rows ask for, if they ask for more than the step gives anyway."""

        def row(i: int) -> SamplingRow | None:
            found = self._completions.get(plan.chunks[i].request)
            return found[1].sampling_row() if found else None  # None: ended while its step was on the way

        for i, chunk in enumerate(plan.chunks[plan.num_decodes :], plan.num_decodes):
            if chunk.start == 0 and (first := row(i)) is not None:
                self._sampling.set(int(slots[i]), first)
        if self._sampling.all_greedy(slots):
            return outputs.greedy
        context_len = np.array([chunk.start + chunk.num_tokens for chunk in plan.chunks])
        return self.loop.sample(
            outputs, *self._sampling.inputs(slots, context_len, outputs.logits.shape[0], row)
        )

    def _pack(self, plan: StepPlan, slots: list[int]) -> tuple[PackedBatch, Bucket]:
        """A decode goes on with the token that was sampled last for its slot, whether the host knows it by now or not."""
        _, starts, lengths, _ = zip(*plan.chunks, strict=True)
        ids = [IN_FLIGHT] * plan.num_decodes
        for request, start, num_tokens, _ in plan.chunks[plan.num_decodes :]:
            self._completions[request][0].scheduled()
            known = request.prompt_token_ids
            if request.output_token_ids:  # it was preempted
                known = known + request.output_token_ids
            ids += known[start : start + num_tokens]
        return pack_rows(slots, starts, lengths, ids)

    def _deliver(self, step: "_RunningStep", changed: dict[str, RequestState]) -> None:
        """Wait for a step, and give its tokens to the requests."""
        begin, late = time.monotonic(), step.sampled.token_ids.is_ready()  # type: ignore[attr-defined]
        sampled: SampledTokens = jax.device_get(step.sampled)
        self.seconds_waited = 0.0 if late else time.monotonic() - begin
        for part in step.prompt_logprobs:
            part.deliver(self.tokenizer)
        chunks = step.plan.chunks
        self._count_experts(step, step.plan.num_tokens, len(chunks))

        tokens = sampled.token_ids[: len(chunks)]  # padding rows sampled too
        now, completions = time.monotonic(), self._completions
        values, finite = tokens.tolist(), sampled.finite.tolist()
        for row in self.scheduler.update(step.plan, values):
            request = chunks[row].request
            state, completion = completions[request]
            changed[state.request_id] = state
            if not finite[row]:
                request.output_token_ids.pop()
                self._end(completion, "error")
                continue
            state.progressed(now)
            token = values[row]
            if sampled.logprobs is not None and completion.params.logprobs is not None:
                width = min(completion.params.logprobs, self.model_config.vocab_size)
                tokenizer = self.tokenizer if completion.params.detokenize else None
                completion.logprobs.append(token_logprobs(row, token, sampled.logprobs, width, tokenizer))
            if reason := completion.accept(token):
                self._end(completion, reason)

    def _count_experts(self, step: "_RunningStep", tokens: int, rows: int) -> None:
        """Take in the router counts of a step: where the chosen experts were, and what the policy learns."""
        counts, in_pool, buffered = np.asarray(step.router_counts), step.in_pool, step.buffered
        self.num_routed_tokens += tokens
        self.router_counts += counts
        self.experts.observe(counts, tokens, rows)
        chosen = counts > 0
        touched, hits, buffer_hits, loaded = (
            int(np.count_nonzero(mask)) for mask in (chosen, chosen & in_pool, chosen & buffered, buffered)
        )
        self.metrics.add("expert_hits", hits - buffer_hits)
        self.metrics.add("expert_buffer_hits", buffer_hits)
        self.metrics.add("expert_host_reads", touched - hits)
        self.metrics.add("expert_pages_loaded", loaded * self.experts.matrices)

    def _end(self, completion: Completion, reason: FinishReason) -> None:
        completion.close()
        state, _ = self._forget(completion.request)
        self.scheduler.finish(completion.request, reason)
        if state.finished:
            self._states.pop(state.request_id, None)

    def _forget(self, request: Request) -> tuple[RequestState, Completion]:
        return self._completions.pop(request)

    # Offline use ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once, and return the outputs in the order of the prompts.

        A prompt is text, a list of token ids, or {"prompt_token_ids": ids}. Raises ValueError before anything runs
        when one of them cannot be served; nothing stays queued.
        """
        prompts = _prompt_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(sampling_params)} sampling_params came for {len(prompts)} prompts, give one or as many"
            )
        ids = [f"generate-{next(self._arrivals)}" for _ in prompts]
        done: dict[str, RequestOutput] = {}
        try:
            for request_id, prompt, params in zip(ids, prompts, sampling_params, strict=True):
                self.add_request(request_id, prompt, params, priority=priority)
            with Progress(console=Console(stderr=True), disable=not use_tqdm, transient=True) as bar:
                task = bar.add_task("generating", total=len(prompts))
                while len(done) < len(ids):
                    for state in self._advance():
                        if state.finished and state.request_id in ids:
                            done[state.request_id] = state.output()
                            bar.advance(task)
        finally:
            for request_id in ids:
                if request_id not in done and self.abort(request_id):
                    del self._unreported[request_id]
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one conversation (a list of messages) or several."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        tokenizer = require_tokenizer(self.tokenizer, self.tokenizer_folder)
        prompts: list[Prompt] = []
        for conversation in conversations:
            ids = tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            prompts.append({"prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput]:
        """Complete one prompt, yielding it after every token. Leaving the loop early ends the request."""
        request_id = f"stream-{next(self._arrivals)}"
        self.add_request(request_id, prompt, sampling_params)
        finished = False
        try:
            while not finished:
                for output in self.step():
                    if output.request_id == request_id:
                        finished = output.finished
                        yield output
        finally:
            if not finished and self.abort(request_id):
                del self._unreported[request_id]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError for a model that came without one."""
        return require_tokenizer(self.tokenizer, self.tokenizer_folder)

    def get_metrics(self) -> dict[str, int | float]:
        """All counters and gauges by name."""
        return self.metrics.snapshot()


def _engine_config(arguments: Mapping[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ValueError(f"unknown engine arguments {', '.join(unknown)}; there are {', '.join(known)}")
    return EngineConfig(**arguments)


def _prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        return [prompts]
    return list(prompts)


def _token_ids(prompt: Any) -> list[int]:
    try:
        ids = list(prompt)
    except TypeError:
        ids = [prompt]
    if not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"a prompt is {prompt!r:.60}, it must be text or a list of token ids")
    return [int(i) for i in ids]
