"""Environments for the tests, found by other processes."""

import asyncio
import os
import random
import time

from lockstep.agents import Action, Environment, ToolEnvironment, Turn


class Counts(Environment):
    """Random lengths, contents, rewards and delays, all from the seed and what the policy said."""

    def __init__(self, turns=3, delay=0.0):
        self.turns, self.delay = turns, delay

    def reset(self, row, seed):
        self.chance, self.turn = random.Random(seed), 0
        return Turn([{"role": "user", "content": f"start {seed % 97}"}])

    def step(self, action: Action):
        time.sleep(self.chance.random() * self.delay)
        self.turn += 1
        done = self.turn >= self.turns
        text = "x" * self.chance.randrange(12)
        messages = [] if done else [{"role": "user", "content": f"{len(action.text)} {text}"}]
        return Turn(messages, reward=0.25 * self.turn + 0.01 * len(action.text), done=done, info={"said": len(action.text)})


class CountsInALoop(Counts):
    async def step(self, action: Action):
        await asyncio.sleep(self.chance.random() * self.delay)
        self.delay = 0
        return Counts.step(self, action)


_TEXTS = ("", " ", "x" * 12, "\n\n", "two words ", "é ∑ 漢", '{"a": [1]}', "<think>\nHm.\n</think>\n\nso", "y" * 60)


class Anything(Environment):
    """Messages, rewards and the turn that fails by chance, all from the seed; delays from nowhere."""

    def __init__(self, turns, delay=0.0, fails="never", marker=None):
        self.turns, self.delay, self.fails, self.marker = turns, delay, fails, marker

    def reset(self, row, seed):
        self.chance, self.turn = random.Random(seed), 0
        self.failing_turn = self.chance.randint(0, self.turns)
        self.fail()
        system = [{"role": "system", "content": "Be brief."}] if self.chance.random() < 0.3 else []
        return Turn([*system, {"role": "user", "content": f"start {self.chance.choice(_TEXTS)}"}])

    def fail(self):
        if self.fails == "never" or self.turn != self.failing_turn:
            return
        if self.fails == "once":
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        raise OSError("no disk")

    def step(self, action: Action):
        if self.delay:
            time.sleep(random.SystemRandom().random() * self.delay)
        return self.answer(action)

    def answer(self, action: Action):
        self.turn += 1
        self.fail()
        done, reward = self.turn >= self.turns, self.chance.choice([None, 0.5, -1, 0.01 * len(action.text)])
        messages = [{"role": "user", "content": f"{len(action.text)} {self.chance.choice(_TEXTS)}"}]
        return Turn([] if done else messages, reward=reward, done=done, info={"said": len(action.text), "done": done})


class AnythingInALoop(Anything):
    async def step(self, action: Action):
        await asyncio.sleep(random.SystemRandom().random() * self.delay)
        return self.answer(action)


class AnythingQuick(Anything):
    is_quick = True


class Breaks(Counts):
    """Fails in its own way by the row, the first time or always."""

    def __init__(self, how, marker=None):
        super().__init__(2)
        self.how, self.marker = how, marker

    def step(self, action):
        if self.marker is not None:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return super().step(action)
        match self.how:
            case "raise":
                raise OSError("no disk")
            case "hang":
                time.sleep(1000)
            case "die":
                os._exit(3)
            case "wrong":
                return "not a Turn"
            case "huge":
                return Turn([{"role": "user", "content": "y" * 100_000}])
        return super().step(action)


class LeftToTheReward(Counts):
    """Says nothing of the one turn that it has: the run's reward judges it."""

    is_judged = True
    is_quick = True

    def __init__(self, phrase="start"):
        super().__init__(1)

    def step(self, action):
        return Turn(done=True)


class TellsAReward(Counts):
    """Its info has the names that a run has for its own numbers."""

    is_quick = True

    def step(self, action):
        return Turn(reward=0.5, done=True, info={"reward": 99, "score": 98, "episode": 97})


class HasTools(ToolEnvironment):
    """One tool of its own."""

    tools = ("double",)

    def double(self, x: int) -> int:
        """Doubles.

        Args:
            x: A number.
        """
        return 2 * x


class Connects(ToolEnvironment):
    """Its tool says whether the event loop that it runs in is that of the first call."""

    tools = ("ask",)
    loop = None

    async def ask(self) -> str:
        """Asks."""
        loop = asyncio.get_running_loop()
        self.loop = self.loop or loop
        return str(self.loop is loop)
