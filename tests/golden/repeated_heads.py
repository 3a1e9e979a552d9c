"""The words in which models repeat key heads, and others that mean something else."""
# ruff: noqa: E501  one form a line

import torch

B, G, N, S, D = 2, 2, 3, 5, 4  # batch, key heads, copies, tokens, head dim
H = G * N

BGSD, BSGD = (B, G, S, D), (B, S, G, D)

# What a model does to the keys [B, G, S, D] or [B, S, G, D] that it has.
FORMS = {
    "hf": (BGSD, lambda k: k[:, :, None, :, :].expand(B, G, N, S, D).reshape(B, H, S, D)),
    "short_index": (BGSD, lambda k: k[:, :, None].expand(-1, -1, N, -1, -1).flatten(1, 2)),
    "ellipsis": (BGSD, lambda k: k[..., None, :, :].expand(B, G, N, S, D).reshape(B, -1, S, D)),
    "contiguous_view": (BGSD, lambda k: k.unsqueeze(2).expand(B, G, N, S, D).contiguous().view(B, H, S, D)),
    "functions": (BGSD, lambda k: torch.flatten(torch.broadcast_to(torch.unsqueeze(k, 2), (B, G, N, S, D)), 1, 2)),
    "interleave": (BGSD, lambda k: k.repeat_interleave(N, 1)),
    "interleave_function": (BGSD, lambda k: torch.repeat_interleave(k, N, dim=-3)),
    "interleave_keywords": (BGSD, lambda k: torch.repeat_interleave(k, repeats=N, dim=1)),
    "interleave_twice": ((B, 1, S, D), lambda k: k.repeat_interleave(3, 1).repeat_interleave(2, 1)),
    "repeat_new_dim": (BGSD, lambda k: k.unsqueeze(2).repeat(1, 1, N, 1, 1).reshape(B, H, S, D)),
    "tile_new_dim": (BGSD, lambda k: torch.tile(k.unsqueeze(2), (N, 1, 1)).flatten(1, 2)),
    "unflatten": (BGSD, lambda k: k.unflatten(1, (G, 1)).expand(B, G, N, S, D).flatten(1, 2)),
    "before_transpose": (BSGD, lambda k: k.unsqueeze(3).expand(B, S, G, N, D).reshape(B, S, H, D).transpose(1, 2)),
    "interleave_before_transpose": (BSGD, lambda k: k.repeat_interleave(N, dim=2).transpose(1, 2).contiguous()),
    "after_permute": (BSGD, lambda k: k.permute(0, 2, 1, 3).repeat_interleave(N, 1).to(k.dtype)),
    "movedim": (BSGD, lambda k: torch.movedim(k.repeat_interleave(N, 2), 2, 1).clone()),
    "five_dims": ((B, S, G * D), lambda k: k.view(B, S, G, 1, D).expand(B, S, G, N, D).reshape(B, S, H, D).permute(0, 2, 1, 3)),
    "one_head": ((B, 1, S, D), lambda k: k.expand(-1, H, -1, -1)),
    "one_head_repeat": ((B, 1, S, D), lambda k: k.repeat(1, H, 1, 1)),
    "one_head_before_transpose": ((B, S, 1, D), lambda k: k.expand(B, S, H, D).transpose(1, 2)),
    "no_head": ((B, S, D), lambda k: k.unsqueeze(1).expand(B, H, S, D)),
    "no_head_before_transpose": ((B, S, D), lambda k: k[:, :, None].repeat(1, 1, H, 1).swapaxes(1, 2)),
}  # fmt: skip


def in_no_grad(k):
    with torch.no_grad():
        return k.repeat_interleave(N, 1)


def written(k):
    repeated = k.repeat_interleave(N, 1)
    repeated[:, 0].mul_(2.0)
    return repeated


def written_at_the_beginning(k):
    k = k + 1.0
    repeated = k.repeat_interleave(N, 1)
    k.mul_(2.0)
    return repeated


def written_through_a_view(k):
    k = k + 1.0
    repeated = k.transpose(1, 2).repeat_interleave(N, 2).transpose(1, 2)
    k.flatten(2)[0] = 3.0
    return repeated


# The twins: other orders of the heads, other elements, other gradients.
KEPT = {
    "tiled": (BGSD, lambda k: k.repeat(1, N, 1, 1)),
    "concatenated": (BGSD, lambda k: torch.cat([k] * N, 1)),
    "expanded_outside": (BGSD, lambda k: k.unsqueeze(1).expand(B, N, G, S, D).reshape(B, H, S, D)),
    "half_tiled": (BGSD, lambda k: k.repeat(1, N, 1, 1).repeat_interleave(1, 1)),
    "tiled_and_interleaved": ((B, G, S, D), lambda k: k[:, :, None].expand(B, G, N, S, D).transpose(1, 2).reshape(B, H, S, D)),
    "mixed_up": (BSGD, lambda k: k.unsqueeze(3).expand(B, S, G, N, D).reshape(B, H, S, D)),
    "rows_between": (BGSD, lambda k: k.unsqueeze(3).expand(B, G, S, N, D).reshape(B, H, S, D)),
    "scaled": (BGSD, lambda k: k.repeat_interleave(N, 1) * 1.5),
    "detached": (BGSD, lambda k: k.repeat_interleave(N, 1).detach()),
    "without_gradient": (BGSD, in_no_grad),
    "unequally_often": (BGSD, lambda k: k.repeat_interleave(torch.tensor([2, 4]), 1, output_size=H)),
    "a_part": ((B, G, S + 1, D), lambda k: k.repeat_interleave(N, 1)[:, :, 1:]),
    "reversed": (BGSD, lambda k: k.repeat_interleave(N, 1).flip(1)),
    "rounded": (BGSD, lambda k: k.repeat_interleave(N, 1).to(torch.float32).to(k.dtype)),
    "other_heads": (BGSD, lambda k: k.repeat_interleave(N, 1)[:, [5, 4, 3, 2, 1, 0]]),
    "not_repeated": ((B, H, S, D), lambda k: k.transpose(1, 2).transpose(1, 2)),
    "written": (BGSD, written),
    "written_at_the_beginning": (BGSD, written_at_the_beginning),
    "written_through_a_view": (BGSD, written_through_a_view),
}  # fmt: skip
