"""A score_mod that is compiled ahead of time, as score_programs.py writes it.

sigmoid(score) + slope[h] * (kv_idx - q_idx), of 16 heads, whose slopes are captured.
"""

SCORE_MOD = """
def forward(values, score, b, h, q_idx, kv_idx):
    select = torch.ops.aten.select.int(values, 0, 0)
    select_1 = torch.ops.aten.select.int(select, 0, 0)
    slope = torch.ops.aten.slice.Tensor(select_1, 0, 0, 16)
    sigmoid = torch.ops.aten.sigmoid.default(score)
    index = torch.ops.aten.index.Tensor(slope, [h])
    sub = torch.ops.aten.sub.Tensor(kv_idx, q_idx)
    mul = torch.ops.aten.mul.Tensor(index, sub)
    add = torch.ops.aten.add.Tensor(sigmoid, mul)
    return add

def backward(values, score, b, h, q_idx, kv_idx, grad):
    sigmoid = torch.ops.aten.sigmoid.default(score)
    found = torch.ops.aten.sigmoid_backward.default(grad, sigmoid)
    return (found, values)
"""
