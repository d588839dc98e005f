"""Causes of an attempt's end: from what a process said last to a class of causes, and the setting
to change.

The first row that fits decides: what only follows from something else stands below it. No row
guesses: SIGKILL alone does not tell who sent it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

ENGINE = "the sampler's engine"
LOG = re.compile(r"(?:The end of|see|log:) (\S+\.log)\b")  # of the process that a reason is about
MODULE = re.compile(r"^[\w.]+\.(?=\w+: )")  # that a log writes before the name of an exception
SAMPLER = ("SamplerError: ", "NoServerLeft: ", "EngineGone: ", "NoAnswer: ", "RequestRefused: ")
CONFIG = ("ConfigError: ", "RunDirectoryUsed: ", "error: ")
CUDA_FULL = r"OutOfMemoryError|CUDA( error:)? out of memory"


@dataclass(frozen=True)
class Row:
    name: str
    what: str
    advice: str
    process: str = ""  # where it is not the one that said so
    # the reason does: with a class of this project's errors, and the key it names
    begins: tuple[str, ...] = ("",)
    says: str = ""  # searched for in the reason: what other programs print


@dataclass(frozen=True)
class Cause:
    name: str
    what: str
    process: str
    phase: str
    log: str
    advice: str

    def as_fields(self) -> dict[str, str]:
        """The fields of status.json, where `class` is the name."""
        return {"class": self.name} | {
            key: value for key, value in asdict(self).items() if key != "name"
        }

    @classmethod
    def read(cls, found: Any) -> Cause | None:
        """A cause from what `as_fields` gave; None from anything else."""
        if not isinstance(found, Mapping) or "class" not in found:
            return None
        return cls(
            *(
                str(found.get("class" if one.name == "name" else one.name, ""))
                for one in fields(cls)
            )
        )

    def paragraph(self) -> str:
        where = ", ".join(filter(None, (self.process, self.phase and f"in {self.phase}")))
        said = f"why: {self.what} ({self.name})" + (f": {where}." if where else ".")
        return " ".join(filter(None, (said, self.advice, self.log and f"Its log is {self.log}.")))


OUT_OF_MEMORY = Row(
    "host_memory",
    "the machine ran out of memory",
    "Ask for more (in Slurm --mem, in a shell `ulimit -v`), or need less: lower "
    "learner.tokens_per_microbatch, rollout.prompts_per_step, reward.workers, and on hosts "
    "sampler.vllm.kv_cache_memory_bytes.",
    says=r"\bMemoryError\b|[Cc]an('t|not) allocate memory|unable to mmap|oom[-_ ]kill|bad_alloc|failed to map segment",
)
STUCK = Row(
    "stuck_process",
    "a process did not go on",
    "Its log and its stack say where it was. Where it was only slow, raise the time that the "
    "reason names: run.hang_timeout_s, sampler.start_timeout_s, sampler.request_timeout_s or "
    "reward.timeout_s.",
    says=r"no progress for|did not answer .* within|collective operation timeout|Timed out waiting \d+",
)
FOLLOWS_FROM_STUCK = ("unknown", "stuck_process", "dead_process", "lost_peer", "engine")
UNKNOWN = Row("unknown", "no known cause", "The last lines of its log are all that is known.")

ROWS = (
    Row(
        "reward_hangs",
        "the reward does not answer in time",
        "Mend the function that reward.name names, or give it more time (reward.timeout_s) or "
        "more workers (reward.workers).",
        process="the reward workers",
        begins=("RewardsHang: ",),
    ),
    Row(
        "environment",
        "the environment fails",
        "Mend the class that environment.name names: the reason has what it raised or returned.",
        process="the environment's processes",
        begins=("RewardError: ",),
        says=r"; the first: environment: ",
    ),
    Row(
        "reward",
        "the reward fails",
        "Mend the function that reward.name names: call it with a row of data.train and an "
        "answer. Variables that it needs are listed in reward.environment.",
        process="the reward workers",
        begins=("RewardError: ", *(f"{one}reward." for one in CONFIG)),
    ),
    Row(
        "engine_memory",
        "the sampler's engine does not fit into its memory",
        "Where the cache is too small, raise sampler.vllm.gpu_memory_utilization (on hosts "
        "sampler.vllm.kv_cache_memory_bytes) or lower rollout.max_response_tokens; where others "
        "need the memory, lower it. sampler.vllm.max_num_seqs bounds what is answered at once, "
        "sampler.tensor_parallel divides the weights.",
        process=ENGINE,
        begins=SAMPLER,
        says=rf"{CUDA_FULL}|can't allocate memory|No available memory for the cache|Free memory on device|"
        r"KV\s+cache is needed",
    ),
    Row(
        "gpu_memory",
        "a GPU ran out of memory",
        "Lower learner.tokens_per_microbatch, set learner.recompute=full, or raise "
        "learner.tensor_parallel, or learner.context_parallel for long answers; where the engine "
        "shares the GPU, sampler.sleep=offload or less of sampler.vllm.gpu_memory_utilization.",
        says=rf"{CUDA_FULL}|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    Row(
        "shared_memory",
        "shared memory is full",
        "Enlarge /dev/shm (a container has 64 MiB by default: --shm-size), or let updates travel "
        "elsewhere: sync.dir.",
        says=r"ended by SIGBUS|Bus error|unable to open shared memory object|does not fit into /dev/shm|"
        r"(unable to write to file|No space left on device).*/dev/shm|/dev/shm.*No space left on device",
    ),
    Row(
        "disk_full",
        "a disk is full",
        "Free space where the reason says, or use another place: run.root, sync.dir, TMPDIR. "
        "checkpoint.keep_last, checkpoint.keep_every and log.record_every decide how much a run "
        "writes.",
        says=r"No space left on device|Disk quota exceeded|does not fit into /",
    ),
    Row(
        "open_files",
        "too few files may be open at once",
        "Raise the limit before the run starts (`ulimit -n 65536`; where its hard limit is "
        "lower, the administrator does), or need less: lower reward.workers, "
        "sampler.engines.",
        says=r"Too many open files|\[Errno 2[34]\]",
    ),
    OUT_OF_MEMORY,
    STUCK,
    Row(
        "non_finite",
        "the loss or the gradient is not a number",
        "`megatron-rl rerun-step DUMP` repeats the update and names the first value that is no "
        "number. Then lower optim.lr or optim.megatron.clip_grad; "
        "learner.on_nonfinite=skip_and_dump goes on without the update.",
        begins=("NonFiniteError: ",),
    ),
    Row(
        "non_finite_sampler",
        "the sampler returned logprobs that are no numbers",
        "correction.non_finite=drop goes on without those tokens. Where they are many, the "
        "engine's kernels or scales are wrong: compare with quantization.format=none.",
        process=ENGINE,
        says=r"correction\.non_finite: raise stops",
    ),
    Row(
        "probe",
        "sampler and learner disagree after a sync",
        "The reason says what the numbers look like, and what to try. Compare with "
        "quantization.format=none; a number in sync.probe_budget is for a difference that the "
        "format alone explains.",
        process=ENGINE,
        begins=("SyncMismatch: ",),
    ),
    Row(
        "sync",
        "the weights did not reach the sampler",
        "The reason names the tensor or the file. Check the room and the rights of sync.dir, and "
        "that all servers of a fleet run this version; sync.full_every=1 sends whole versions.",
        process=ENGINE,
        begins=("WeightSyncError: ", "UpdateRefused: "),
    ),
    Row(
        "checkpoint",
        "a checkpoint cannot be read",
        "`megatron-rl checkpoints RUN` says which are whole; run.if_exists=resume passes over "
        "the others. Weights to begin with come from model.path.",
        begins=("TornCheckpoint: ", "CheckpointError: "),
    ),
    Row(
        "run_directory",
        "the run's directory cannot be written",
        "It was removed, moved or made read-only while the run went on: leave it in place, or "
        "choose another run.root.",
        begins=("RecordLost: ",),
    ),
    Row(
        "data",
        "the data cannot be used",
        "The reason names file and row. data.prompt_key and data.answer_key name the columns; "
        "data.long_prompts=drop leaves out what is longer than rollout.max_prompt_tokens.",
        begins=tuple(f"{one}data." for one in CONFIG),
    ),
    Row(
        "configuration",
        "the configuration cannot run",
        "Change the key that the reason names; `megatron-rl train RECIPE --dry-run` checks the "
        "others as well.",
        begins=CONFIG,
    ),
    Row(
        "rendezvous",
        "the ranks did not find each other",
        "One of them has not started, or cannot reach the others: look for the first one that "
        "ended, and at MASTER_ADDR, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        says=r"DistStoreError|DistNetworkError|wait timeout after \d+ ?ms|clients joined|ranks cannot meet",
    ),
    Row(
        "device",
        "a GPU or its link failed",
        "Look for Xid in the machine's `dmesg` and leave the node out; NCCL_DEBUG=INFO names the "
        "link.",
        says=r"CUDA error|CUDNN_STATUS|CUBLAS_STATUS|NCCL error|ncclSystemError|ncclRemoteError|ncclUnhandledCudaError",
    ),
    Row(
        "alarm",
        "an alarm ended the run",
        "What to do about it was said when it was raised, and stands in docs/alarms.md; "
        "log.alarms turns alarms off or moves their bounds.",
        says=r": alarm \w+: ",
    ),
    Row(
        "time_limit",
        "the job's time was over",
        "run.if_exists=resume goes on from the newest checkpoint; checkpoint.minutes decides how "
        "much is done again.",
        says=r"DUE TO TIME LIMIT|\btime limit\b",
    ),
    Row(
        "dead_process",
        "a process was killed",
        "SIGKILL comes from outside. From a person or a scheduler: run.if_exists=resume goes on. "
        "From the kernel, when memory is short: `dmesg` says so; lower "
        "learner.tokens_per_microbatch, rollout.prompts_per_step or, on hosts, "
        "sampler.vllm.kv_cache_memory_bytes.",
        says=r"ended by SIGKILL",
    ),
    Row(
        "crash",
        "a process crashed in native code",
        "The end of its log may name the library. Kernels that do not suit the machine do this, "
        "and so do versions that do not belong together: constraints/ has those that were tested.",
        says=r"ended by (SIG(SEGV|ABRT|ILL|FPE|SYS|TRAP)|signal)\b",
    ),
    Row(
        "signal",
        "somebody asked it to end",
        "run.if_exists=resume goes on from the newest checkpoint.",
        says=r"\bSIG(INT|TERM|USR1|USR2|HUP)\b|KeyboardInterrupt|^interrupted",
    ),
    Row(
        "lost_peer",
        "another process went away",
        "This one only followed. The logs beside its own, srun's lines or the machine's `dmesg` "
        "say which was first; run.if_exists=resume goes on.",
        says=r"(?i)connection (closed|reset|refused)|broken pipe|another rank has ended",
    ),
    Row(
        "gone",
        "all its processes are gone",
        "They were killed together, or their machine went away: the scheduler's lines or its "
        "`dmesg` say which. run.if_exists=resume goes on from the newest checkpoint.",
        says=r"^ended without a word",
    ),
    Row(
        "engine",
        "the sampler's engine failed",
        "Read the end of its log. What it is started with is in sampler.vllm; "
        "sampler.start_timeout_s gives a slow machine more time.",
        process=ENGINE,
        begins=SAMPLER,
    ),
)


def explain(
    reason: str,
    *,
    process: str = "",
    phase: Any = None,
    log: str = "",
    out_of_memory: bool = False,
    stuck: Any = None,
) -> Cause:
    """The cause why an attempt failed or was stopped, by its last word.

    `process`, `phase`, `log`: whose word that is. `out_of_memory`: the kernel has counted a process
    of this run that it ended. `stuck`: a process that was seen not to go on, as status.json has it.
    """
    bare = MODULE.sub("", reason)
    row = next(
        (row for row in ROWS if bare.startswith(row.begins) and re.search(row.says, reason)),
        UNKNOWN,
    )
    process = ENGINE if bare.startswith(SAMPLER) else process
    if out_of_memory and "SIGKILL" in reason:
        row = OUT_OF_MEMORY
    elif isinstance(stuck, Mapping) and row.name in FOLLOWS_FROM_STUCK:
        row = STUCK
        process = stuck.get("process") or process
        phase = stuck.get("phase") or phase
    named = LOG.search(reason)
    where = str(row.process or process), str(phase or ""), named[1] if named else log
    return Cause(row.name, row.what, *where, row.advice)
