"""Random trainings with graphs of blocks, over a stand-in that runs reductions beside them early or late, against the same
without."""

import functools
import random

import pytest
import torch

from gtp_dtensor import GTPConfig, stats
from gtp_dtensor.block_graphs import GraphedBlocks
from tests.graph_stand_in import BlockStandIn
from tests.harness import ranks
from tests.reference import assert_equal_to_reference, full_gradients
from tests.test_block_graphs import NUM_LAYERS, build
from tests.test_graphs import slow, tokens_of


def _play(model, rank, world_size, chance, num_steps):
    """A random training, the same for the same ``chance``: (losses, gradients after each step's last backward)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forwards = [layer.forward for layer in model.layers]

    def halves(x, forward):
        half = len(x) // 2
        return torch.cat([forward(x[:half]), forward(x[half:])])

    def loss_of(n, length=7):
        return model(tokens_of(n, rank, world_size, length=length)[0]).float().square().mean()

    found = []
    for number in range(num_steps):
        for n in range(10 * number, 10 * number + chance.choice((1, 1, 2, 3))):
            what = chance.choice(("plain", "plain", "halves", "length", "two", "eval", "write", "part"))
            if number < 2:
                what = "plain"
            place = chance.randrange(NUM_LAYERS)
            if what == "halves":
                model.layers[place].forward = functools.partial(halves, forward=forwards[place])
            if what == "write":
                with torch.no_grad():
                    model.layers[place].attention.wq.weight.mul_(0.875)
            if what == "eval":
                with torch.no_grad():
                    found.append(loss_of(n).item())
            loss = loss_of(n, 9 if what == "length" else 7)
            if what == "two":
                loss = loss + loss_of(n + 5)
            if what == "part":  # without the last blocks' backwards
                x = model.tok_embeddings(tokens_of(n, rank, world_size)[0])
                for layer in model.layers[: place + 1]:
                    x = layer(x)
                loss = loss.detach() + x.float().square().mean()
            found.append(loss.item())
            loss.backward()
            model.layers[place].forward = forwards[place]
        found.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=chance.random() < 0.5)
    return found


@ranks(2)
@pytest.mark.parametrize("seeds", [range(3), slow(range(3, 30))], ids=["few", "many"])
def test_random_trainings(mesh, rank, world_size, seeds):
    """With and without graphs, whatever is called in which order, and whenever reductions run."""
    num_replays = num_eager = num_late = 0
    for seed in seeds:
        results = []
        chance = random.Random(seed)
        config = GTPConfig(
            graph_wgrad_ring_size=chance.choice((1, 2, 3)),
            look_ahead=chance.choice((1, 2, 4, 9)),
            param_dtype=chance.choice((None, torch.bfloat16)),
            recompute_keep_bytes=chance.choice((None, 0)),
        )
        recompute = chance.random() < 0.3
        for is_graphed in (False, True):
            model = build(mesh, config, recompute=recompute)
            if is_graphed:
                recorder = BlockStandIn(model, random.Random(seed))
                blocks = GraphedBlocks(model, ["layers.*"], recorder=recorder, num_warmup_passes=2)
            results.append(_play(model, rank, world_size, random.Random(seed), 6))
            assert stats(model).num_pending == 0
        for place, (one, other) in enumerate(zip(*results, strict=True)):
            if isinstance(one, dict):
                assert_equal_to_reference(other, one, f"seed {seed}, {place}: gradient")
            else:
                assert one == other, (seed, place)
        num_replays, num_eager = num_replays + blocks.num_replays, num_eager + blocks.num_eager
        num_late += blocks.num_late_gathers
        blocks.release()
    assert min(num_replays, num_eager, num_late) > 0, (num_replays, num_eager, num_late)
