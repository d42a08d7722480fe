"""What the evaluation commands share: task and generator from flags."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli.options import require_calibration, require_gates
from kvkeep.core.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from kvkeep.cli.loading import Loaded
    from kvkeep.core.policy import Policy
    from kvkeep.core.precision import Precision
    from kvkeep.evaluation.generator import ModelGenerator
    from kvkeep.evaluation.prompts import PromptTemplate
    from kvkeep.evaluation.sampling import Sampling
    from kvkeep.evaluation.tasks.base import Task
    from kvkeep.evaluation.vllm_generator import VllmGenerator

ENGINES = ("transformers", "vllm")

TaskText = Annotated[
    str, typer.Option("--task", help="A task, with settings in brackets: 'needle(length=4096)'.")
]
TaskModel = Annotated[
    str | None, typer.Option("--model", help="Folder or hub id of a model [the task's own].")
]
Data = Annotated[
    str | None,
    typer.Option(help="The task's data file, or a folder that holds it [the folder in KVKEEP_DATA]."),
]
Part = Annotated[
    str, typer.Option("--split", help="dev, or confirm for a run of the frozen study of --prereg.")
]
Limit = Annotated[int | None, typer.Option(help="At most so many problems, a fair sample.")]
Draws = Annotated[int, typer.Option(help="Samples per problem.")]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Samples written together; results do not depend on it [the task's own]."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Sampling as in a paper: vase, triattention, rkv, trimkv; trace, greedy [the task's own]."
    ),
]
Temperature = Annotated[float | None, typer.Option(help="Overrides the preset; 0 takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Overrides the preset.")]
TopK = Annotated[int | None, typer.Option(help="Overrides the preset; 0 is no limit.")]
MaxNew = Annotated[int | None, typer.Option(help="Most new tokens per sample [the preset's or task's own].")]
RepetitionRise = Annotated[
    float | None,
    typer.Option(
        help="Temperature added to a text that only repeats itself, in proportion to its repeated n-grams "
        "[0: none]."
    ),
]
RepetitionNgram = Annotated[int | None, typer.Option(help="Tokens per n-gram of --repetition-rise [4].")]
RepetitionWindow = Annotated[
    int | None, typer.Option(help="Newest tokens that --repetition-rise looks at [64].")
]
RefeedEvery = Annotated[
    int | None, typer.Option(help="Read the prompt again after every so many tokens of the answer [never].")
]
RefeedEvictions = Annotated[
    int | None, typer.Option(help="Read the prompt again after every so many evictions [never].")
]
PromptName = Annotated[
    str | None,
    typer.Option("--prompt", help="Prompt template: plain, chat, vase, vase-gsm8k, rkv [the task's own]."),
]
TaskPromptMode = Annotated[
    str | None,
    typer.Option(
        "--prompt-mode",
        help="counts: prompt entries count towards the budget. kept: they stay on top [the task's own].",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        help="transformers, or vllm with kvkeep's plug-in: same prompts, same draws, same logs "
        '(pip install "kvkeep[vllm]").'
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        help="key=value: an argument of vllm.LLM, for example max_num_seqs=64. Repeatable.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that a process needs to write samples; it can be sent to another machine.

    Parameters
    ----------
    task, data
        As given.
    model
        Resolved source, and the name that the header shows.
    policy
        What to keep.
    preset, overrides, prompt
        Sampling and template by name, and single settings.
    calibration, gates, precision, prefill_chunk, dtype, attention, device, threads
        As for ``kvkeep generate``.
    engine, engine_options
        Who writes the samples, and arguments of that engine.
    log_evictions
        Note what every eviction takes away.
    """

    task: str
    data: str | None
    model: str
    model_name: str
    policy: Policy
    preset: str | None = None
    overrides: tuple[tuple[str, Any], ...] = ()
    prompt: str | None = None
    calibration: Path | None = None
    gates: Path | None = None
    precision: Precision | None = None
    prefill_chunk: int | None = None
    dtype: str = "float32"
    attention: str = "sdpa"
    device: str = "auto"
    threads: int | None = None
    engine: str = "transformers"
    engine_options: tuple[tuple[str, Any], ...] = ()
    log_evictions: bool = False

    def __post_init__(self) -> None:
        check_engine(self)
        if not self.policy.bounded and dict(self.overrides).get("refeed_evictions") is not None:
            raise ConfigError(
                f"{self.policy.name} evicts nothing, so --refeed-evictions would never read again: use "
                "--refeed-every."
            )
        require_calibration(self.policy, self.calibration)
        require_gates(self.policy, self.gates)

    def make_task(self) -> Task:
        """The task."""
        from kvkeep.evaluation.tasks.registry import make_task

        return make_task(self.task, data=self.data)

    def sampling(self, task: Task) -> Sampling:
        """The preset with its lengths for the task, and what overrides it."""
        from kvkeep.evaluation.sampling import sampling_preset

        preset = sampling_preset(self.preset or task.sampling)
        chosen = preset.for_task(task.name, task.max_new)
        given = dict(self.overrides)
        return replace(chosen, **given, preset=f"{chosen.preset} changed") if given else chosen

    def request(self) -> dict[str, Any]:
        """All but the policy, what stores its entries and the files made for it, JSON-ready."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        del facts["policy"], facts["calibration"], facts["gates"], facts["precision"]
        return facts


def check_engine(setup: Setup) -> None:
    """Refuse settings that the engine cannot follow, before anything is loaded.

    Raises
    ------
    UnknownNameError
        If there is no such engine.
    ConfigError
        Naming the first setting that does not fit.
    """
    if setup.engine not in ENGINES:
        raise UnknownNameError("engine", setup.engine, ENGINES)
    if setup.engine == "transformers":
        if setup.engine_options:
            raise ConfigError("--engine-option is for --engine vllm: leave it out.")
        return
    if setup.policy.traits.reads is not None:
        raise ConfigError(
            f"{setup.policy.name} is a selector, and vLLM's attention reads every block that is stored: use "
            "--engine transformers, or a policy that evicts."
        )
    unused = {
        **{
            f"--{name.replace('_', '-')}": True
            for name, _ in setup.overrides
            if name.startswith(("repetition", "refeed"))
        },
        "--gates": setup.gates is not None,
        "--kv-bits": setup.precision is not None,
        "--prefill-chunk": setup.prefill_chunk is not None,
        "--attention": setup.attention != "sdpa",
        "--device": setup.device != "auto",
        "--threads": setup.threads is not None,
        "--log-evictions": setup.log_evictions,
    }
    for flag, given in unused.items():
        if given:
            raise ConfigError(
                f"{flag} has no meaning for --engine vllm{_INSTEAD.get(flag, '')}: leave it out."
            )


_INSTEAD = {
    "--threads": ", which takes the variable OMP_NUM_THREADS",
    "--kv-bits": ", which stores all entries in one precision of its own (kv_cache_dtype)",
    "--prefill-chunk": ", which takes --engine-option max_num_batched_tokens=N",
}


def read_engine_options(given: list[str] | None) -> tuple[tuple[str, Any], ...]:
    """Arguments of the engine from ``key=value``.

    Raises
    ------
    ConfigError
        If one cannot be read.
    """
    from kvkeep.policies.text import read_value

    read = {}
    for setting in given or []:
        key, equals, value = setting.partition("=")
        if not (equals and key.strip() and value.strip()):
            raise ConfigError(
                f"cannot read --engine-option {setting!r}: write key=value, for example max_num_seqs=64."
            )
        read[key.strip().replace("-", "_")] = read_value(value.strip())
    return tuple(sorted(read.items()))


def make_generator(setup: Setup) -> ModelGenerator | VllmGenerator:
    """Load the model, or what is needed to have vLLM load it."""
    from kvkeep.cli import loading
    from kvkeep.evaluation.generator import ModelGenerator
    from kvkeep.evaluation.prompts import prompt_template

    if setup.engine == "vllm":
        from kvkeep.serving.launching import prepare

        prepare()  # a missing package is told before weights are read
    task = setup.make_task()
    sampling, template = setup.sampling(task), prompt_template(setup.prompt or task.template)
    loaded = loading.load_model(
        setup.model,
        dtype=setup.dtype,
        attention=setup.attention,
        device="cpu" if setup.engine == "vllm" else setup.device,
        threads=setup.threads,
    )
    if setup.engine == "vllm":
        return _vllm_generator(setup, loaded, template, sampling)
    return ModelGenerator(
        loaded.model,
        loaded.tokenizer,
        name=setup.model_name,
        policy=setup.policy,
        template=template,
        sampling=sampling,
        calibration=loading.load_calibration(setup.calibration, loaded),
        gates=loading.load_gates(setup.gates, loaded),
        precision=setup.precision,
        prefill_chunk=setup.prefill_chunk,
        log_evictions=setup.log_evictions,
    )


def _vllm_generator(
    setup: Setup, loaded: Loaded, template: PromptTemplate, sampling: Sampling
) -> VllmGenerator:
    """Take from the model what decides a result in any engine, and let go of it."""
    from kvkeep.cli import loading
    from kvkeep.engine.spec import model_spec
    from kvkeep.evaluation.generator import end_tokens
    from kvkeep.evaluation.identity import weights_sha256
    from kvkeep.evaluation.vllm_generator import VllmGenerator

    statistics = loading.load_calibration(setup.calibration, loaded)
    return VllmGenerator(
        setup.model,
        loaded.tokenizer,
        name=setup.model_name,
        weights_sha256=weights_sha256(loaded.model),
        max_positions=model_spec(loaded.model.config).max_positions,
        end_tokens=end_tokens(loaded.model, loaded.tokenizer),
        policy=setup.policy,
        template=template,
        sampling=sampling,
        calibration=setup.calibration,
        calibration_sha256=None if statistics is None else str(statistics.sha256),
        dtype=setup.dtype,
        options=dict(setup.engine_options),
    )
