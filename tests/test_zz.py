import copy, gc, weakref
from tests.test_te import *
from gtp_dtensor import refresh, materialized

@ranks(2)
def test_copy(mesh, rank, world_size):
    with te.installed():
        recipe = te.Recipe("delayed")
        model = build_fp8(recipe, True)()
        parallelize_module(model, mesh, GTPStyle(min_numel=1000))
        twin = copy.deepcopy(model)
        x = batch_of(rank, 0, 12, DIM)
        outs = []
        for one in (model, twin):
            with te.autocast(recipe, amax_group(one)):
                y = one(x)
            mean_square(y).backward()
            outs.append(y)
        assert torch.equal(*outs)
        for a, b in zip(model.parameters(), twin.parameters()):
            assert torch.equal(full(a.grad), full(b.grad))
        assert twin.a.__dict__[STATE].weights["weight"].owner is twin.a
        with materialized(model.b) as w:
            assert w.shape == model.b.weight.shape
        with torch.inference_mode(), te.autocast(recipe):
            model(x)
        # nothing outlives the backward
        from gtp_dtensor.te_weight import WeightUse, TEWeight
        gc.disable()
        del y, outs
        alive = [o for o in gc.get_objects() if isinstance(o, (WeightUse, TEWeight))]
        assert not alive, alive
        gc.enable()
        ref = weakref.ref(model.a.__dict__[STATE].weights["weight"])
        del model, one, a, w
        gc.collect()
        assert ref() is None

@ranks(2)
def test_sac(mesh, rank):
    from torch.utils.checkpoint import create_selective_checkpoint_contexts, CheckpointPolicy, checkpoint
    import functools
    with te.installed():
        model = Net()
        parallelize_module(model, mesh, GTPStyle(min_numel=100))
        ctx = functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE)
        y = checkpoint(model, batch_of(rank).requires_grad_(), use_reentrant=False, context_fn=ctx)
        mean_square(y).backward()
        model.zero_grad()
        with te.autocast(None):
            y2 = model(batch_of(rank))
        assert torch.equal(y, y2)
