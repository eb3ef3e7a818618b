"""Gathers that neighbouring tokens share. Unions are compared with Python's sets, answers with the reference.

It runs on a GPU or under the interpreter (test_sparse_mla_interpreted.py)."""

import pytest
import torch
from test_sparse_mla_kernel import DEVICE, GPU, PAGE, check, needs_gpu, problem, run, truth

from shim.kernels.sparse_mla import launch, tune, union
from shim.kernels.sparse_mla.overlap import overlapping_indices
from shim.kernels.sparse_mla.union import Unions

LENGTHS = (300, 200)
# bf16: groups of 8 for any card, the plan for a larger shared memory, and that for 12.x. The interpreter runs them all
CONFIGS = {
    "bf16": [tune.Config(16, 64, 128, 4, 8, 1, group=8), tune.SHARED_LARGE[False][8], tune.SHARED[False][8]],
    "fp8": [tune.SHARED_LARGE[True][8], tune.Config(16, 16, 64, 4, 4, 1, group=2)],
}


def neighbours(tokens, heads=8, columns=64, kv="bf16", q="bf16", keep=0.9, switch=None, seed=0, lengths=LENGTHS):
    """As `problem`, but tokens of one request stand side by side, and their positions overlap and are distinct. The
    second request begins at token `switch`."""
    inputs, (topk, req_ids, table, seq_lens) = problem(tokens, heads, columns, kv, q, lengths=lengths, seed=seed)
    switch = tokens // 2 + 1 if switch is None else switch
    g = torch.Generator().manual_seed(seed)
    for r, part in enumerate((slice(0, switch), slice(switch, tokens))):
        count = len(topk[part])
        if count:
            topk[part] = overlapping_indices(count, columns, lengths[r], keep, g, causal=count <= lengths[r]).to(DEVICE)
        req_ids[part] = r
    topk[1::7, ::3] = -1
    topk[5::9] = -1
    topk[2::11, : columns // 4] += 2**20  # stale: beyond the request
    return inputs, (topk, req_ids, table, seq_lens)


def shared(tokens, heads, dtype, config, columns=64, groups=None, width=320, sets=8):
    workspace = launch.Workspace(tokens, heads, dtype, DEVICE, columns)
    groups = groups or -(-tokens // config.group)
    workspace.unions = Unions(groups, config.group, width, sets * columns, DEVICE)
    for buffer in (workspace.unions.bits, workspace.unions.entries, workspace.unions.counts):
        buffer.fill_(-7)
    return workspace


@pytest.mark.parametrize("tokens", [1, 3, 19, 62, 64, 65] if GPU else [3, 19])
@pytest.mark.parametrize("kv, number", [(kv, n) for kv, configs in CONFIGS.items() for n in range(len(configs))])
def test_equals_reference(tokens, kv, number):
    config = CONFIGS[kv][number]
    if GPU and kv == "bf16" and config is CONFIGS[kv][1] and not launch.is_large(torch.device("cuda", 0)):
        pytest.skip("needs the shared memory of 9.0")
    inputs, indices = neighbours(tokens, kv=kv, seed=tokens)
    workspace = shared(tokens, 8, inputs[1].dtype, config)
    for _ in range(2):  # one call leaves nothing that changes the next
        check(run(inputs, indices, workspace=workspace, sharing=config), truth(inputs, indices))


def test_fp16_and_other_heads():
    for heads, config in ((16, tune.Config(16, 32, 128, 4, 8, 1, group=2)), (12, tune.SHARED[False][8])):
        inputs, indices = neighbours(5, heads, kv="fp16", q="fp16", seed=heads)
        workspace = shared(5, heads, inputs[1].dtype, config)
        check(run(inputs, indices, workspace=workspace, sharing=config), truth(inputs, indices))


@pytest.mark.parametrize("switch", [0, 3, 8, 16])
def test_a_group_of_two_requests_is_not_shared(switch):
    config = CONFIGS["bf16"][0]
    inputs, indices = neighbours(17, keep=0.98, switch=switch)
    workspace = shared(17, 8, inputs[1].dtype, config)
    check(run(inputs, indices, workspace=workspace, sharing=config), truth(inputs, indices))
    assert [count < 0 for count in workspace.unions.counts.tolist()] == [switch == 3, False, False]


@pytest.mark.parametrize("ends_alike", [True, False])
def test_a_union_that_saves_too_little_is_left_alone(ends_alike):
    config = CONFIGS["bf16"][0]
    inputs, (topk, *rest) = neighbours(16, switch=16)
    topk[8:] = topk[8:9]
    topk[:7] = overlapping_indices(7, 64, 300, 0.0, torch.Generator().manual_seed(1), causal=False).to(DEVICE)
    topk[7] = topk[0] if ends_alike else overlapping_indices(1, 64, 300, 0, torch.Generator().manual_seed(2)).to(DEVICE)
    workspace = shared(16, 8, inputs[1].dtype, config, sets=2)
    check(run(inputs, (topk, *rest), workspace=workspace, sharing=config), truth(inputs, (topk, *rest)))
    distinct = len(set(topk[8].tolist()) - {-1})
    assert workspace.unions.counts.tolist() == [-1, distinct] and distinct <= workspace.unions.capacity


def test_a_request_longer_than_there_is_memory_for():
    config = CONFIGS["bf16"][0]
    inputs, indices = neighbours(16, keep=0.98, switch=8)
    workspace = shared(16, 8, inputs[1].dtype, config, width=224)  # of 300 and 200 positions
    check(run(inputs, indices, workspace=workspace, sharing=config), truth(inputs, indices))
    assert [count < 0 for count in workspace.unions.counts.tolist()] == [True, False]


def test_more_groups_than_there_is_memory_for():
    config = CONFIGS["bf16"][2]
    inputs, indices = neighbours(19)
    workspace = shared(19, 8, inputs[1].dtype, config, groups=2)
    check(run(inputs, indices, workspace=workspace, sharing=config), truth(inputs, indices))


@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("length", [31, 32, 33, 300])
def test_unions_are_the_sets(group, length):
    tokens = 2 * group + 1
    _, (topk, req_ids, _, seq_lens) = neighbours(tokens, keep=0.95, switch=tokens, lengths=(length, 40))
    unions = Unions(8, group, 320, group * 64, DEVICE)
    for buffer in (unions.bits, unions.entries, unions.counts):
        buffer.fill_(-7)
    entries, counts = unions.build(topk, req_ids, seq_lens)
    assert (counts >= 0).all()
    for g in range(3):
        expected = {}
        for bit, row in enumerate(topk[g * group : (g + 1) * group].tolist()):
            for position in row:
                if 0 <= position < length:
                    expected[position] = expected.get(position, 0) | 1 << bit
        got = entries[g, : counts[g]].tolist()
        assert [(entry >> 8, entry & 255) for entry in got] == sorted(expected.items())


def test_sharing_is_for_many_neighbours_only(monkeypatch):
    monkeypatch.setattr(tune, "SHARE_FROM", 16)
    inputs, indices = neighbours(16, switch=16)
    workspace = launch.Workspace(16, 8, inputs[1].dtype, DEVICE, 64, positions=320)
    groups = 2 * workspace.unions.group
    for near, used in ((0, False), (groups - 1, False), (groups, True)):
        workspace.unions.counts.fill_(-7)
        check(run(inputs, indices, workspace=workspace, neighbours=near), truth(inputs, indices))
        assert (workspace.unions.counts[0].item() != -7) == used, near


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("large", [True, False])
def test_warm_up_covers_long_prompts(monkeypatch, kv, large):
    """All constants of the kernels: those of a prefill's shared launch, and of the launch for the other tokens."""
    seen = set()

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **constants: seen.add((self.name, frozenset(constants.items())))

    for module, names in ((launch.kernel, ("attend", "merge")), (union, ("look", "mark", "emit"))):
        for name in names:
            monkeypatch.setattr(module, name, Kernel(name))
    monkeypatch.setattr(launch, "is_large", lambda device: large)
    monkeypatch.setattr(launch, "sm_count", lambda device: 132)
    dtype = torch.uint8 if kv == "fp8" else torch.bfloat16
    launch.warm_up(8, torch.bfloat16, dtype, PAGE, 4096, DEVICE)
    warm = set(seen)
    workspace = launch.Workspace(4096, 8, dtype, DEVICE, positions=4096)
    inputs, (topk, req_ids, table, seq_lens) = problem(1, 8, 2048, kv)
    for tokens in (1, 8, 64, 512, 4096):
        query = inputs[0].expand(tokens, -1, -1)
        indices = (topk.expand(tokens, -1), req_ids.expand(tokens).contiguous(), table, seq_lens)
        run((query, inputs[1]), indices, workspace=workspace, neighbours=tokens)
    assert len(warm) > 4 and seen == warm


def test_bad_arguments():
    with pytest.raises(ValueError, match="positions"):
        Unions(1, 8, (1 << 23) + 1, 8, "cpu")
    with pytest.raises(ValueError, match="a group is of 16 tokens"):
        Unions(1, 16, 320, 64, "cpu")
    inputs, indices = neighbours(3)
    with pytest.raises(ValueError, match="workspace"):
        run(inputs, indices, sharing=CONFIGS["bf16"][0])
    other = shared(3, 8, inputs[1].dtype, CONFIGS["bf16"][2])
    with pytest.raises(ValueError, match="sharing is by 8 tokens, the workspace for 4"):
        run(inputs, indices, workspace=other, sharing=CONFIGS["bf16"][0])


@needs_gpu
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_long_prompt_and_its_graph(kv):
    """2,048 tokens of a prompt of 262,209. Its graph gives the same bits, also for other indices."""
    length, tokens = 262_209, 2048
    inputs, (topk, req_ids, table, seq_lens) = problem(8, 8, 2048, kv, lengths=(length, 64))
    g = torch.Generator(DEVICE).manual_seed(0)
    query = torch.randn(tokens, 8, 576, generator=g, device=DEVICE).bfloat16()
    topk = overlapping_indices(tokens, 2048, length, 0.95, torch.Generator().manual_seed(0)).to(DEVICE)
    req_ids = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    launch.warm_up(8, torch.bfloat16, inputs[1].dtype, PAGE, tokens, DEVICE)
    workspace = launch.Workspace(tokens, 8, inputs[1].dtype, DEVICE, positions=length)
    inputs, indices = (query, inputs[1]), (topk, req_ids, table, seq_lens)
    if workspace.unions is None:
        pytest.skip("nothing is shared on this GPU")
    before = launch.compiled.count()
    graph = torch.cuda.CUDAGraph()
    run(inputs, indices, workspace=workspace, neighbours=tokens)
    with torch.cuda.graph(graph):
        out, lse = run(inputs, indices, workspace=workspace, neighbours=tokens)
    some = torch.arange(0, tokens, 127, device=DEVICE)
    for seed in range(2):
        topk.copy_(topk.roll(seed, 0))
        graph.replay()
        eager = run(inputs, indices, workspace=workspace, neighbours=tokens)
        assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
        assert (workspace.unions.counts >= 0).float().mean() > 0.98  # roll() puts the last tokens beside the first
        want = truth((query[some], inputs[1]), (topk[some], req_ids[some], table, seq_lens))
        check((out[some], lse[some]), want)
    assert launch.compiled.count() == before
