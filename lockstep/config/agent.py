"""Episodes of many turns: which environment, which tools, and what an episode may use."""

from dataclasses import dataclass, field

from lockstep.config.check import at_home, at_least, one_of
from lockstep.errors import ConfigError

HISTORIES = ("sampled", "template")


@dataclass
class AgentConfig:
    """With an environment or tools, every prompt becomes an episode; with neither, one response as ever."""

    environment: str | None = None
    """The other side of an episode: "file.py:Class" or "module:Class", a subclass of lockstep.agents.Environment. Null with tools: the one
    that calls them. A row's column `environment` stands above it; `env_kwargs` are its arguments."""
    tools: list[str] = field(default_factory=list)
    """Functions that the policy may call, each as "file.py:name" or "module:name", or one that ships: python, calculator,
    search."""
    mcp: list[str] = field(default_factory=list)
    """Commands that start MCP servers on stdin and stdout, whose tools the policy may call. Every episode that does has its own servers."""
    search_folder: str | None = None
    """Where the tool search looks: .txt, .md and .rst files, cut at blank lines, and .jsonl files with a text or contents in each row."""
    search_results: int = 3
    """How many passages the tool search returns."""
    parser: str = "auto"
    """How the model writes calls: auto (by its chat template), hermes, qwen_xml, llama_json, pythonic, mistral, harmony, or "file.py:name"
    for a function of your own."""
    history: str = "sampled"
    """What the policy sees of earlier turns: sampled (the tokens themselves, and between them what the chat template writes for new
    messages, which must not depend on the turns before), or template (the whole conversation is rendered before each turn: for templates
    that drop thinking or move messages; where the tokens so far are not its beginning, the episode goes on in a new context)."""
    max_turns: int = 8
    """Most turns of the policy in an episode."""
    max_turn_tokens: int | None = None
    """Most tokens of one turn of the policy. Null: what is left of data.max_response_length, which is for the whole episode."""
    max_observation_tokens: int | None = None
    """Most tokens of one message of the environment after the first ones (data.max_prompt_length); the rest is cut off, and the message
    says so."""
    max_environments: int = 64
    """Episodes that are played at once in each worker. An environment whose class another process can find has a process of its own."""
    step_timeout_s: float = 60.0
    """Deadline of each call of an environment."""
    episode_timeout_s: float = 600.0
    """Longest time that one episode may spend in its environment."""
    retries: int = 1
    """How often an episode whose environment failed is played again, with the same random numbers, before it counts as missing."""
    record: bool = True
    """Whether what environments say in training is kept in the run's folder (episodes/), so that lockstep replay needs no environment."""
    recorded: str | None = None
    """A file of such episodes to be played again instead of asking environments: set by lockstep replay."""

    def __post_init__(self) -> None:
        at_home(self, "search_folder", "recorded")
        at_least(self, "agent", 1, "max_turns", "max_environments", "search_results")
        at_least(self, "agent", 0, "retries")
        one_of("agent.history", self.history, HISTORIES)
        for name in ("max_turn_tokens", "max_observation_tokens"):
            if getattr(self, name) is not None:
                at_least(self, "agent", 1, name)
        for name in ("step_timeout_s", "episode_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"agent.{name}={getattr(self, name)}: a deadline must be over 0 seconds", key=f"agent.{name}")

    @property
    def is_on(self) -> bool:
        """Whether prompts become episodes."""
        return self.environment is not None or self.recorded is not None or bool(self.tools or self.mcp)
