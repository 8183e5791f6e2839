"""Limits and defaults on pages that are constants of the code: (page, text on the page, place, value).

A place is `module:NAME` in `buckeye`, `module:CLASS.field` for the default of a setting, or `COMMAND:--flag`.
"""

MIB, GIB = 2**20, 2**30

_ROWS = {
    "docs/explanation/mcp-rollouts.md": [
        (
            "it wrote more than 16 MiB in reply to one message",
            "mcp.client.server_process:MAX_OUTPUT",
            16 * MIB,
        ),
        ("or 64 MiB to stderr", "mcp.client.server_process:MAX_STDERR", 64 * MIB),
    ],
    "docs/explanation/reliability.md": [
        ("at most 256 MB)", "base.disk:_MAX_RESERVE", 256_000_000),
        ("waits a minute for space", "base.disk:WAIT_SECONDS", 60.0),
        ("Ten such batches in a\nrow end the run", "trainer.rl:_MAX_UNUSABLE_BATCHES", 10),
        ("sends no heartbeat for 30 seconds", "config.supervision:SupervisionConfig.heartbeat_timeout", 30.0),
        ("makes no progress for half an hour", "config.supervision:SupervisionConfig.stall_timeout", 1_800.0),
        ("after six failures in ten minutes", "config.supervision:SupervisionConfig.max_restarts", 5),
        ("six failures in ten minutes", "config.supervision:SupervisionConfig.restart_window", 600.0),
        (
            "After three failures in a row, all weights come from files",
            "trainer.output.broadcast:_MAX_FAILURES",
            3,
        ),
    ],
    "docs/explanation/security.md": [
        ("64 GiB and 1,000,000 files unpacked", "mcp.images.unpack:MAX_BYTES", 64 * GIB),
        ("and 1,000,000 files unpacked", "mcp.images.unpack:MAX_ENTRIES", 1_000_000),
        ("a layer 200 times its packed size", "mcp.images.unpack:_MAX_RATIO", 200),
        ("500 layers", "mcp.images.manifest:MAX_LAYERS", 500),
        ("1 MiB of names and attributes in one header", "mcp.images.unpack:_MAX_EXTENSION", MIB),
        ("1,024 processes and threads", "gateway:--processes", 1024),
        ("200,000 files, 1 GiB of printed text", "remote.received_files:MAX_FILES", 200_000),
        ("1 GiB of printed text", "remote.follow:_MAX_LOG_BYTES", GIB),
        ("4,096 connections", "base.http_server:_MAX_CONNECTIONS", 4096),
        ("64 MiB a request (gateway 16, wire 32)", "inference.server.responses:_MAX_BODY_BYTES", 64 * MIB),
        ("(gateway 16, wire 32)", "mcp.gateway.app:MAX_BODY_BYTES", 16 * MIB),
        ("wire 32)", "workers.proxy.app:MAX_BODY_BYTES", 32 * MIB),
        ("256 MiB, and a regular file", "base.foreign_files:MAX_TEXT_BYTES", 256 * MIB),
    ],
    "docs/explanation/workers.md": [
        ("sent no heartbeat for a minute", "envs.settings:WorkerSettings.heartbeat_timeout", 60.0),
        ("printed more than 64 MiB in a minute", "envs.settings:WorkerSettings.max_output_bytes", 64 * MIB),
        ("within ten seconds of its cancellation", "envs.settings:WorkerSettings.cancel_timeout", 10.0),
        ("the pauses between restarts grow to 30 seconds", "workers.pool:_MAX_PAUSE", 30.0),
        ("most 5 times in 10 minutes", "orchestrator.rollout_workers:_MAX_RESTARTS", 5),
        ("5 times in 10 minutes", "orchestrator.rollout_workers:_RESTART_SECONDS", 600.0),
    ],
    "docs/how-to/agents.md": [("a body of more than 32 MiB", "workers.proxy.app:MAX_BODY_BYTES", 32 * MIB)],
    "docs/how-to/check-a-run.md": [
        ("on 20 tasks of each family and split", "evaluation.doctor_checks:_SAMPLE", 20),
        ("at most n = 1,024 tokens", "trainer.model.logprobs:_CHUNK_TOKENS", 1024),
        ("with logits of 128 MiB", "trainer.model.logprobs:_CHUNK_BYTES", 128 * MIB),
        ("512 MiB, minus the memory", "trainer.model.logprobs:_CHUNK_BYTES_ON_GPU", 512 * MIB),
        ("on a CPU at most 64 MiB", "inference.engine.weights:_MAX_SECOND_SET_BYTES", 64 * MIB),
        (
            "After three steps, log and `events.jsonl` show",
            "launch.preflight.trainer_forecast:MEASURED_STEPS",
            3,
        ),
        ("The remaining time follows the last 20 steps", "launch.progress:_MEASURED", 20),
    ],
    "docs/how-to/check-environments.md": [
        ("requests more than 1,000 replies", "envs.scripted:TURN_LIMIT", 1000),
        ("a warning if it takes over 30 s", "evaluation.checks.scripted_runner:ROLLOUT_SECONDS", 30.0),
        ("`--budget` seconds (60)", "env check:--budget", 60.0),
        ("reads at most 20,000 tasks of a split", "evaluation.checks.samples:MAX_SCANNED", 20_000),
        ("at most 300 of each family and split (`--sample`)", "evaluation.env_check:MAX_SAMPLE", 300),
        ("`--max-content-free` (0.03)", "env check:--max-content-free", 0.03),
        ("false alarms in at most 1 %", "evaluation.checks.chance:LEVEL", 0.01),
        (
            "an accepted answer with a reward below 0.5",
            "evaluation.checks.rollout_checks:MIN_ANSWER_REWARD",
            0.5,
        ),
    ],
    "docs/how-to/checkpoints.md": [
        ("`ckpt.store_timeout` seconds (1800)", "config.shared:CheckpointConfig.store_timeout", 1_800.0),
        ("writes one every 10 steps", "config.shared:CheckpointConfig.interval", 10),
        ("keeps the newest three", "config.shared:CheckpointConfig.keep", 3),
    ],
    "docs/how-to/diagnose.md": [("over the last 100 steps", "orchestrator.sampling_bias:_STEPS", 100)],
    "docs/how-to/evaluate.md": [
        ("more than 64 characters) are replaced", "evaluation.tool_names:_MAX_LENGTH", 64),
        ("at least `--pass-reward` (1)", "eval:--pass-reward", 1.0),
    ],
    "docs/how-to/gateway.md": [
        ("64 sessions at once (`--sessions`)", "gateway:--sessions", 64),
        ("600 seconds without a request (`--idle-seconds`)", "gateway:--idle-seconds", 600.0),
        ("7200 seconds\nof a session", "gateway:--session-seconds", 7_200.0),
        ("1024 processes and 4g of files for each", "gateway:--processes", 1024),
        ("and 4g of files for each", "gateway:--disk", "4g"),
        ("A message may have 16 MiB", "mcp.gateway.app:MAX_BODY_BYTES", 16 * MIB),
        ("http://localhost:8765/mcp", "gateway:--port", 8765),
    ],
    "docs/how-to/inspect-runs.md": [
        ("spread evenly over the run, up to 8 MB", "ui.export:_MOST_TEXT", 8_000_000),
        ("by default 8420, or a free one", "cli.ui:_PORT", 8420),
    ],
    "docs/how-to/learning-rate.md": [
        ("each of 12 steps up to", "setup.tuning.search:MIN_STEPS", 12),
        ("five forks", "setup.tuning.tune:_FORKS", 5),
        ("(100 for a run without an end)", "setup.tuning.tune:_MAX_STEPS", 100),
    ],
    "docs/how-to/lora.md": [("Above 0.02 nats", "trainer.output.weight_rounding:KL_WARNING_THRESHOLD", 0.02)],
    "docs/how-to/mcp-environments.md": [
        ("up to 200 MB or 20,000 files", "setup.init.named_paths:_MAX_BYTES", 200_000_000),
        ("or 20,000 files", "setup.init.named_paths:_MAX_FILES", 20_000),
        (
            "cut at 400\n  characters (200 for an argument)",
            "setup.init.generate:_MAX_TEXT_LENGTH",
            {"tool": 400, "parameter": 200},
        ),
        ("Each action has 20 seconds", "setup.init.trial:_CALL_SECONDS", 20.0),
        ("the trial 5 minutes", "setup.init.trial:_TIMEOUT_SECONDS", 300.0),
    ],
    "docs/how-to/prompts-and-rewards.md": [
        ("A reply has up to 256 tokens", "setup.recipe.environment:_ANSWER_TOKENS", 256),
        ("a call of more than 300 s", "dataset.functions:_SECONDS", 300.0),
        ("for up to 5 s a test", "dataset.built_in:_TEST_SECONDS", 5.0),
        (
            "`prompt`, `messages`, `question`, `problem`, `instruction`, `query`, `input`",
            "dataset.prompts:PROMPT_COLUMNS",
            ("prompt", "messages", "question", "problem", "instruction", "query", "input"),
        ),
        ("a tenth of the prompts", "dataset.prompt_tasks:_SHARE", 10),
    ],
    "docs/how-to/publish-environments.md": [
        ("1 GiB; the command and the card", "mcp.tasks.dataset:MAX_FILES_BYTES", GIB)
    ],
    "docs/how-to/remote.md": [
        ("not ready after 30 minutes is given up", "remote.rental:_READY_SECONDS", 1_800.0),
        ("More than 20,000 files or 4 GiB are refused", "remote.manifest:MOST_FILES", 20_000),
        ("up to ten minutes before", "remote.remote_run:_MARGIN_SECONDS", 600.0),
        ("or 4 GiB are refused", "remote.manifest:MOST_BYTES", 4 * GIB),
        ("after 30 minutes without contact", "remote.rental:_DEAD_MAN_MINUTES", 30.0),
    ],
    "docs/how-to/serve.md": [
        ("body over 64 MiB", "inference.server.responses:_MAX_BODY_BYTES", 64 * MIB),
        ("over 16,384 sequences in a request", "inference.server.service:_MAX_SEQUENCES", 16_384),
        ("on a CPU 1 GB by default", "launch.preflight.memory_plan:_VLLM_CPU_CACHE", 1_000_000_000),
    ],
    "docs/how-to/start-a-run.md": [
        ("up to 16 tasks on GPUs and 4 on a CPU", "setup.recipe.sizes:_MAX_GROUPS", {"gpu": 16, "cpu": 4}),
        ("plus 12 turns", "setup.recipe.sizes:_TURNS", 12),
        (
            "at most 8192 tokens on GPUs and 2048 on a CPU",
            "setup.recipe.sizes:_MAX_ROLLOUT_TOKENS",
            {"gpu": 8192, "cpu": 2048},
        ),
        ("at least four turns", "setup.recipe.sizes:_MIN_TURNS", 4),
        ("more than a third of a rollout", "setup.recipe.sizes:_MAX_DESCRIPTION_SHARE", 1 / 3),
    ],
    "docs/how-to/third-party.md": [
        ("default: the environment's, else 100", "workers.worker_side.adapters.gymnasium:_MAX_STEPS", 100)
    ],
    "docs/how-to/write-environments.md": [
        ("finite numbers of at most 1e30", "envs.stdlib_only.outcomes:MAX_NUMBER", 1e30),
    ],
    "docs/reference/mcp-files.md": [
        ("| memory | 4 GiB |", "mcp.grading.grader_processes:_LIMITS.memory", 4 * GIB),
        ("verdict, query, pattern | 10, 5, 2 seconds", "mcp.grading.grader_processes:_JUDGE_SECONDS", 10.0),
        ("query, pattern | 10, 5, 2 seconds", "mcp.grading.read_only_sql:_SECONDS", 5.0),
        ("pattern | 10, 5, 2 seconds", "mcp.grading.judge:_REGEX_SECONDS", 2.0),
        ("file, database | 16 MiB, 1 GiB", "mcp.grading.judge_state:_MAX_TEXT_BYTES", 16 * MIB),
        ("database | 16 MiB, 1 GiB", "mcp.grading.judge_state:_MAX_DATABASE_BYTES", GIB),
    ],
    "docs/reference/rewards.md": [
        ("at most 20 nats", "orchestrator.teacher:_MAX_DIFFERENCE", 20.0),
        ("more than 5 % of the groups of a step are lost", "orchestrator.collected_groups:MOST_LOST", 0.05),
    ],
    "docs/reference/run-directory.md": [
        ("takes 21 bytes a token", "launch.preflight.disk:_BYTES_PER_TRAINED_TOKEN", 21),
    ],
}
CONSTANTS = [(page, *row) for page, rows in _ROWS.items() for row in rows]

_TRAINER = ("--model.name", "m")
REFUSALS = [
    (
        "docs/how-to/write-environments.md",
        "`max_concurrent` is refused in [lockstep]",
        "rl",
        ("--max-async-level", "0", "--orchestrator.env.0.max-concurrent", "2"),
    ),
    (
        "docs/how-to/write-environments.md",
        "`batch_size` must be a multiple of their size",
        "orchestrator",
        ("--batch-size", "100", "--rollouts-per-example", "16"),
    ),
    (
        "docs/how-to/several-gpus.md",
        '8-bit AdamW needs `sharding = "none"`',
        "trainer",
        (*_TRAINER, "--optim.type", "adamw8bit", "--model.sharding", "full"),
    ),
    (
        "docs/how-to/several-gpus.md",
        "LoRA works with shards, not with `tp`",
        "rl",
        (
            "--trainer-gpu-ids",
            "0,1",
            "--trainer.model.tp",
            "2",
            "--trainer.model.experimental.lora.rank",
            "8",
        ),
    ),
    (
        "docs/how-to/several-gpus.md",
        "must be a multiple of `dp_replicate * tp`",
        "rl",
        ("--trainer-gpu-ids", "0,1,2", "--trainer.model.tp", "2"),
    ),
    (
        "docs/how-to/lora.md",
        "vLLM and shards are refused",
        "rl",
        (
            "--trainer.model.quantization",
            "4bit",
            "--trainer.model.experimental.lora.rank",
            "8",
            "--inference.backend",
            "vllm",
        ),
    ),
]
"""Settings that are refused when they are read: (page, text on the page, kind of file, flags)."""

_STEP = "{step_seconds:.1f} | {tokens_per_second:,.0f} | {peak_gib:.1f} GiB |"
_H200 = ("docs/how-to/questions.md", "benchmarks/results/NVIDIA_H200.json")
FIGURES = [
    (*_H200, "rl/2048", f"| 128 rollouts, 2,077 tokens each | {_STEP}"),
    (*_H200, "rl/128", f"| 128 rollouts, 177 tokens each | {_STEP}"),
]
"""Measured figures: (page, file of results, name of the case, text with the names of its values)."""
