"""Game of verifiers v1 for two agents, who say 1 or 2 in turn; the one who brings the sum to 5 wins.

White begins, and may be an agent that is never trained.
"""

import verifiers.v1 as vf


class RaceData(vf.TaskData):
    pass


class RaceTask(vf.Task[RaceData]):
    pass


class RaceConfig(vf.TasksetConfig):
    white_is_the_world: bool = False


class RaceEnvConfig(vf.EnvConfig):
    black: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    white: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class RaceEnv(vf.Env[RaceEnvConfig]):
    async def setup(self, agents):
        if self.taskset.config.white_is_the_world:
            agents.white.trainable = False

    async def run(self, task, agents):
        def seat(name):
            return vf.Task(vf.TaskData(idx=task.data.idx, prompt=None, system_prompt=f"You are {name}."))

        async with (
            agents.black.interaction(seat("black")) as black,
            agents.white.interaction(seat("white")) as white,
        ):
            total, turn = 0, 0
            while total < 5:
                mover = (white, black)[turn % 2]
                said = (await mover.turn(f"The sum is {total}. Say 1 or 2.")).last_reply.strip()
                total += int(said) if said in ("1", "2") else 5
                turn += 1
        for trace, won in ((black.trace, mover is black), (white.trace, mover is white)):
            trace.record_reward("won", float(won))
            trace.record_metric("moves", float(turn))


class RaceTaskset(vf.Taskset[RaceTask, RaceConfig]):
    def load(self):
        for n in range(3):
            yield RaceTask(RaceData(idx=n, prompt="Win."), self.config.task)


__all__ = ["RaceEnv", "RaceTaskset"]
