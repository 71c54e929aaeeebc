# Short windows first: until these shares of the updates each window is cut into so many, which attend to themselves only.
STAGES = [(0.3, 2)]

from pretrain.data import corpus


class _TrainBatches(corpus.TrainBatches):
    def __init__(self, opened, plan, device, rank):
        super().__init__(opened, plan, device, rank)
        self._max_steps = opened._recipe.schedule.max_steps

    def __call__(self, step, micro_step):
        inputs, targets = super().__call__(step, micro_step)
        pieces = next((pieces for share, pieces in STAGES if step < share * self._max_steps), 1)
        length = inputs.shape[1] // pieces
        return inputs.reshape(-1, length), targets.reshape(-1, length)


corpus.TrainBatches = _TrainBatches
